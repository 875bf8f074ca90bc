"""What runs on a machine with a GPU and vLLM: model shapes, pairs of servers, split requests sent by hand."""

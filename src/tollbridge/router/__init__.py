"""The OpenAI-compatible door: takes a request, decides where it runs, relays its tokens.

`ingress` ① checks the request, `decide` ② picks the workers, `flow` drives it as a state machine with `legs` (what each
worker is sent) and `upstream` (talking to one worker), `stream` ⑥ relays. `fleet` and `health` know the workers,
`decisions` remembers, `views` shows.
"""

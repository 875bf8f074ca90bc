// The terms of a decision in words, in the order of thought. A test holds this list to what the router explains.

export const GROUPS = [
  ["The request", [
    ["prompt_tokens", "prompt", "tokens"], ["cached_tokens", "of these cached where it is computed", "tokens"],
    ["decode_cached_tokens", "cached on the decode worker", "tokens"], ["output_tokens", "expected output", "tokens"],
  ]],
  ["First token, if local", [["local_ttft_s", "first token", "s"]]],
  ["First token, if split", [
    ["split_ttft_s", "first token", "s"], ["toll_s", "of that, toll", "s"], ["kv_arrival_s", "last byte of KV", "s"], ["decode_wait_s", "wait on the decode worker", "s"],
    ["stall_s", "without it, each stream beside stands still", "s"], ["fleet_streams", "streams on an average worker", ""],
  ]],
  ["Chosen", [
    ["ttft_s", "first token", "s"], ["ttft_sigma_s", "give or take", "s"], ["wait_s", "wait", "s"], ["prefill_s", "prefill", "s"], ["step_s", "one step of decode", "s"],
    ["streams", "streams beside the prefill", ""], ["slowed_s", "each stands still", "s"],
  ]],
  ["The link", [
    ["wire_bytes", "KV to cross", "B"], ["goodput_bytes_per_s", "goodput", "B/s"], ["wire_s", "alone on the wire", "s"], ["flows", "others on it", ""],
    ["backlog_bytes", "ahead of it", "B"], ["link_spread", "uncertainty", "share"],
  ]],
  ["Price, in requests", [["j_local", "J local", ""], ["j_split", "J split", ""], ["j_others", "of the choice: what others pay", ""], ["j_decode", "of the choice: decoding", ""]]],
  ["Veto", [["veto_tokens", "decode computes itself up to", "tokens"]]],
];

export const NAMES = new Map(GROUPS.flatMap(([, terms]) => terms.map(([name, words, unit]) => [name, { words, unit }])));

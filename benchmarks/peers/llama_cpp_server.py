"""llama.cpp's server, from the package xllamacpp: `python llama_cpp_server.py FILE PORT SETTING…`

Settings are slots=FOLDER, pooling=MEAN (or NONE, …), flash=0, draft=TOKENS, cache=Q8_0
and key=KEY. It prints "listening" when it is ready, and ends when stdin is closed.
"""

import sys

import xllamacpp

params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.port = int(sys.argv[2])
params.n_ctx = 256
params.n_parallel = 1
# On a busy machine, two threads that wait for each other take forever.
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
for name, _, value in (setting.partition("=") for setting in sys.argv[3:]):
    if name == "slots":
        params.slot_save_path = value
        params.swa_full = True
    elif name == "pooling":
        params.embedding = True
        params.pooling_type = getattr(
            xllamacpp.llama_pooling_type, f"LLAMA_POOLING_TYPE_{value}"
        )
    elif name == "flash":
        params.flash_attn_type = int(value)
    elif name == "draft":
        kind = xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE
        params.speculative.types = [kind]
        params.speculative.ngram_simple.size_n = 2
        params.speculative.ngram_simple.size_m = int(value)
    elif name == "cache":
        kind = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{value}")
        params.cache_type_k = params.cache_type_v = kind
    elif name == "key":
        params.api_keys = [value]
    else:
        raise SystemExit(f"there is no setting {name}")
server = xllamacpp.Server(params)  # ends with this process
print("listening", flush=True)
sys.stdin.read()

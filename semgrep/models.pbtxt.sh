name: "encoder"
platform: "onnxruntime_onnx"
input [
  { name: "input_ids" data_type: TYPE_INT64 dims: [ -1 ] },
  # ok: KH-CONFIG-SERVED-CACHE
  { name: "past_key_values.0.key" data_type: TYPE_FP32 dims: [ 4, -1, 32 ] }
]
output [
  # ok: KH-CONFIG-SERVED-MAPS
  # { name: "attentions" }
  # ruleid: KH-CONFIG-SERVED-LOGITS
  { name: "logits" data_type: TYPE_FP32 dims: [ -1, 2 ] },
  {
    # ruleid: KH-CONFIG-SERVED-CACHE
    name: "present.0.key"
    data_type: TYPE_FP32
    dims: [ 4, -1, 32 ]
  }
]
# ruleid: KH-CONFIG-SERVED-EMBEDDING
output { name: "sentence_embedding" data_type: TYPE_FP32 dims: [ 384 ] }
# ruleid: KH-CONFIG-SERVED-MAPS
output [ { name: "attentions" } ]
# ruleid: KH-CONFIG-SERVED-MAPS
output [ { name: "attention_probs" } ]
# ruleid: KH-CONFIG-SERVED-MAPS
output [ { name: "attentions.3" } ]
# ok: KH-CONFIG-SERVED-MAPS
output [ { name: "attention_mask" } ]
# ruleid: KH-CONFIG-SERVED-STATES
output [ { name: "hidden_states_4" } ]
# ruleid: KH-CONFIG-SERVED-STATES
output [ { name: "token_embeddings" } ]
# ruleid: KH-CONFIG-SERVED-EMBEDDING
output [ { name: "embedding" } ]
# ruleid: KH-CONFIG-SERVED-CACHE
output [ { name: "past_key_values" } ]
# ok: KH-CONFIG-SERVED-LOGITS
output [ { name: "label" } ]
# ok: KH-CONFIG-SERVED-LOGITS
output [ { name: "probability" } ]
# ok: KH-CONFIG-SERVED-CACHE
output [ { name: "key" } ]

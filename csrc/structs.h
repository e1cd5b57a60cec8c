// SPDX-License-Identifier: Apache-2.0
// Written by csrc/write_structs.py from structs.py, which says what the fields hold.

#include <cstdint>

struct VerifiedBatch {
  int32_t* input_ids;
  int64_t* positions;
  int32_t* query_start_loc;
  int64_t* idx_mapping;
  int32_t* num_sampled;
  int32_t* num_rejected;
  int64_t* last_sampled;
  int32_t* next_prefill_tokens;
  float* temperature;
  int64_t* seeds;
  int64_t* rope_positions;
  int32_t* rope_deltas;
};

struct PreviousDrafts {
  int64_t* draft_tokens;
  int64_t stride;
};

struct KVTables {
  uint64_t* block_tables;
  int64_t* strides;
  int32_t* block_sizes;
  int32_t* num_blocks;
  int64_t num_blocks_stride;
};

struct DraftBatch {
  int32_t* input_ids;
  int64_t* positions;
  int64_t* rope_positions;
  int64_t* slot_mappings;
  int32_t* query_start_loc;
  int32_t* seq_lens;
  int64_t* first_positions;
  int64_t* idx_mapping;
  int32_t* num_blocks;
  int32_t* rope_deltas;
  int64_t* sample_rows;
  int64_t* sample_positions;
  int64_t* sample_requests;
  float* temperature;
  int64_t* seeds;
  int64_t max_num_reqs;
  int64_t max_num_tokens;
};

struct FedStates {
  char* fallback;
  int64_t* positions;
  int64_t kv_group;
  char* out;
};

struct Numbers {
  int64_t draft_pass;
  int64_t num_reqs;
  int64_t num_samples;
  int64_t num_padded_tokens;
  int64_t limit;
  int64_t mask_token_id;
  int64_t vocab_size;
  int64_t width;
  int64_t rope_stride;
  int64_t shift;
  int64_t is_first;
  int64_t groups;
  int64_t sources;
  int64_t size;
  int64_t dims;
};

constexpr uint32_t STRUCTS_ID = 1160197135u;

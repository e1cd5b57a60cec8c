// SPDX-License-Identifier: Apache-2.0
// Written by csrc/write_structs.py from tree/native.py, which says what fields hold.

#include <cstdint>

struct TreeBatch {
  int32_t* query_start_loc;
  int64_t* masks;
  int32_t* prefix_lens;
  int32_t* num_leading;
  int64_t num_reqs;
  int64_t max_query_len;
};

struct TreeCache {
  char* kv_cache;
  int32_t* places;
  int64_t has_key_runs;
  int64_t has_value_runs;
  int64_t block_stride;
  int64_t head_stride;
  int64_t kv_heads;
  int64_t size;
  int64_t block_size;
};

struct TreeLayer {
  char* query;
  int64_t row_stride;
  int64_t head_stride;
  char* out;
  int64_t out_row_stride;
  int64_t out_head_stride;
  int64_t heads;
  int32_t* block_table;
  int64_t table_stride;
};

struct TreePaths {
  int64_t* slot_mappings;
  int64_t slot_stride;
  int32_t* path;
  int32_t* num_sampled;
  int32_t* first_rows;
  int64_t num_reqs;
  int64_t depth;
};

constexpr uint32_t STRUCTS_ID = 1237267477u;

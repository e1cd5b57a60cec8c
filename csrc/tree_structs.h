// SPDX-License-Identifier: Apache-2.0
// The arguments of tree_attention.cpp, which `tree/cpu.py` makes: a 64-bit word per field.

#include <cstdint>

// The requests of a step with tree attention; see `TreeAttention`.
struct TreeBatch {
  int32_t* query_start_loc;  // [at least num_reqs + 1]
  int64_t* masks;            // [max_num_tokens, 2]
  int32_t* depths;           // [max_num_tokens]
  int32_t* prefix_lens;      // [at least num_reqs]
  int32_t* num_leading;      // [at least num_reqs]
  int64_t num_reqs;
  int64_t max_query_len;
  int64_t num_before;
};

// The KV cache of a layer.
struct TreeCache {
  char* kv_cache;   // [blocks, kv_heads, block_size * 2 * size], of any dtype
  int32_t* places;  // [2, block_size, size], places of a token's K and V in a block
  float* values[2];  // [256] each, what bytes of K and V in fp8 stand for; or null
  // Whether K of a dimension is contiguous over tokens, V of a token over dimensions.
  int64_t has_runs[2];
  int64_t block_stride;
  int64_t head_stride;
  int64_t kv_heads;
  int64_t size;
  int64_t block_size;
};

// What attention of a layer reads and writes besides its KV.
struct TreeLayer {
  char* query;  // [T, heads, size]
  int64_t row_stride;
  int64_t head_stride;
  char* out;  // [T, heads, size]
  int64_t out_row_stride;
  int64_t out_head_stride;
  int64_t heads;
  int32_t* block_table;  // [at least num_reqs, most blocks]
  int64_t table_stride;
  float* sinks;    // [heads], or null
  int64_t window;  // tokens that a row attends to, itself included; 0: all
};

// The accepted paths of a step; see `PathMover`.
struct TreePaths {
  int64_t* slot_mappings;  // [G, T]
  int64_t slot_stride;
  int32_t* path;         // [num_reqs, depth + 1]
  int32_t* num_sampled;  // [num_reqs]
  int32_t* first_rows;   // [num_reqs]
  int64_t num_reqs;
  int64_t depth;
};

// To be raised with every change of a struct, here and in `tree/cpu.py`.
constexpr uint32_t STRUCTS_VERSION = 4;

// SPDX-License-Identifier: Apache-2.0
// Attention of a step that verifies draft trees, for CPU tensors, and the move of the
// KV of accepted paths. All keys are read from the KV cache, which already has those of
// the step's own rows; cpu.py passes the layout of a block.
//
// Softmax is accumulated block by block (Flash-Decoding); masks are those of SpecInfer,
// arXiv 2305.09781. 32 rows (queries times the heads that share keys) are the lanes of
// vectors, so that nothing is reduced within one. Sums are float32.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "tree_structs.h"

// OpenMP's function, from the library that PyTorch uses, so that both have the same
// threads, which may be bound to cores. Without it there is one thread.
extern "C" __attribute__((weak)) void GOMP_parallel(void (*work)(void*), void* data,
                                                    unsigned threads, unsigned flags);

namespace {

constexpr int64_t LANES = 16, VECTORS = 2, ROWS = LANES * VECTORS;
constexpr int64_t KEYS = 32;  // the backend's block sizes are multiples of it
constexpr float LOWEST = -1e30f;

// ---- dtypes ----

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

template <class To, class From>
To as(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &value, sizeof(To));
  return result;
}

float to_float(float value) { return value; }

float to_float(BFloat16 value) { return as<float>(uint32_t{value.bits} << 16); }

float to_float(Half value) {
  const uint32_t sign = (value.bits & 0x8000u) << 16, rest = (value.bits & 0x7fffu) << 13;
  const float size = as<float>(rest) * 0x1p112f;
  const bool is_finite = size < 0x1p16f;
  return as<float>(sign | (is_finite ? as<uint32_t>(size) : rest | 0x7f800000u));
}

// An element of a KV cache. That of a byte, in fp8, is looked up.
template <class Stored>
float read(Stored element, const float*) {
  return to_float(element);
}

float read(uint8_t element, const float* values) { return values[element]; }

void from_float(float value, float* to) { *to = value; }

void from_float(float value, BFloat16* to) {
  const uint32_t bits = as<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  to->bits = static_cast<uint16_t>(value == value ? rounded : 0x7fc0);
}

void from_float(float value, Half* to) {
  const uint32_t sign = as<uint32_t>(value) >> 16 & 0x8000;
  const float size = std::fabs(value);
  uint32_t rest = value == value ? 0x7c00 : 0x7e00;
  if (size < 65520) {  // else it is rounded to infinity
    const int exponent = size < 0x1p-14f ? -14 : std::ilogb(size);
    rest = ((exponent + 14) << 10) + std::lrint(std::ldexp(size, 10 - exponent));
  }
  to->bits = static_cast<uint16_t>(sign | rest);
}

// ---- tiles: ROWS rows, and KEYS keys at a time ----

// Buffers of one thread. Rows are the innermost dimension, except in keys and values.
struct Tile {
  explicit Tile(int64_t size)
      : size(size), memory((2 * size + KEYS + 2) * ROWS + 2 * KEYS * size) {}

  int64_t size;
  std::vector<float> memory;
  float* query = memory.data();          // [size, ROWS], scaled
  float* out = query + size * ROWS;      // [size, ROWS]
  float* scores = out + size * ROWS;     // [KEYS, ROWS]
  float* top = scores + KEYS * ROWS;     // [ROWS]
  float* total = top + ROWS;             // [ROWS]
  float* keys = total + ROWS;            // [size, KEYS]
  float* values = keys + size * KEYS;    // [KEYS, size]
};

struct TileKernels {
  void (*score)(Tile&);
  void (*add_values)(Tile&);
};

namespace any_cpu {
constexpr int64_t AT_ONCE = 2;
#include "tree_tile.h"
}

#if defined(__x86_64__) && !defined(__clang__)
#define HAS_KINDS
#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace avx2 {
constexpr int64_t AT_ONCE = 2;
#include "tree_tile.h"
}
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,fma")
namespace avx512 {
constexpr int64_t AT_ONCE = 4;
#include "tree_tile.h"
}
#pragma GCC pop_options
#endif

const TileKernels& kernels_of_this_cpu() {
#ifdef HAS_KINDS
  if (__builtin_cpu_supports("avx512f")) return avx512::KERNELS;
  if (__builtin_cpu_supports("avx2")) return avx2::KERNELS;
#endif
  return any_cpu::KERNELS;
}

// ---- one tile of one request ----

struct Request {
  int64_t req, begin, queries, prefix, leading;
  int64_t keys;  // of its own step, those of earlier passes included
};

Request locate(const TreeBatch& batch, int64_t req) {
  const int64_t begin = batch.query_start_loc[req];
  const int64_t queries = batch.query_start_loc[req + 1] - begin;
  return {req, begin, queries, batch.prefix_lens[req], batch.num_leading[req],
          batch.num_before + queries};
}

// Whether a query sees a key of its own step.
bool sees(const TreeBatch& batch, const Request& r, int64_t query, int64_t key) {
  if (query < r.leading || key < r.leading) return key <= query;
  const int64_t node = key - r.leading;
  return batch.masks[(r.begin + query) * 2 + node / 64] >> (node % 64) & 1;
}

// How many tokens after the prefix one of its own step's rows or keys is.
int64_t place(const TreeBatch& batch, const Request& r, int64_t index) {
  if (batch.num_before > 0) return index / r.queries;  // as many in each pass
  if (index < r.leading) return index;
  return r.leading + batch.depths[r.begin + index];
}

template <class Element, class Stored>
struct Attention {
  const TreeBatch& batch;
  const TreeCache& cache;
  const TreeLayer& layer;
  float scale;
  int64_t group;  // query heads that share keys
  const TileKernels& kernels = kernels_of_this_cpu();

  void load_queries(Tile& tile, const Request& r, int64_t head, int64_t first,
                    int64_t count) const {
    const auto* query = reinterpret_cast<const Element*>(layer.query);
    std::fill_n(tile.query, tile.size * ROWS, 0.0f);
    for (int64_t i = 0; i < count; ++i) {
      const auto* row = query + (r.begin + (first + i) / group) * layer.row_stride +
                        (head * group + (first + i) % group) * layer.head_stride;
      for (int64_t d = 0; d < tile.size; ++d) {
        tile.query[d * ROWS + i] = to_float(row[d]) * scale;
      }
    }
  }

  // Loads KEYS keys and values from `position` on, a multiple of KEYS.
  void load_keys(Tile& tile, const Request& r, int64_t head, int64_t position) const {
    const int64_t slot = position % cache.block_size, size = tile.size;
    const int64_t block =
        layer.block_table[r.req * layer.table_stride + position / cache.block_size];
    const auto* from = reinterpret_cast<const Stored*>(cache.kv_cache) +
                       block * cache.block_stride + head * cache.head_stride;
    const int32_t* keys = cache.places + slot * size;
    const int32_t* values = keys + cache.block_size * size;
    for (int64_t d = 0; d < size; ++d) {
      load(&tile.keys[d * KEYS], KEYS, from, keys + d, size, 0);
    }
    for (int64_t j = 0; j < KEYS; ++j) {
      load(&tile.values[j * size], size, from, values + j * size, 1, 1);
    }
  }

  // `part`: 0 for K, 1 for V.
  void load(float* to, int64_t count, const Stored* from, const int32_t* places,
            int64_t step, int part) const {
    const float* values = cache.values[part];
    if (cache.has_runs[part]) {
      for (int64_t i = 0; i < count; ++i) to[i] = read(from[places[0] + i], values);
    } else {
      for (int64_t i = 0; i < count; ++i) to[i] = read(from[places[i * step]], values);
    }
  }

  // Hides keys that a row does not see, and those after the last, which are undefined.
  void hide_keys(Tile& tile, const Request& r, int64_t first, int64_t count,
                 int64_t position) const {
    const int64_t begin = std::max<int64_t>(r.prefix - position, 0);
    const int64_t end = std::min(KEYS, r.prefix + r.keys - position);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t query = (first + i) / group;
      const int64_t at = place(batch, r, r.keys - r.queries + query);
      for (int64_t j = layer.window ? 0 : begin; j < end; ++j) {
        const int64_t key = position + j - r.prefix;
        const int64_t key_at = key < 0 ? key : place(batch, r, key);
        const bool is_in_window = !layer.window || key_at > at - layer.window;
        const bool is_seen = is_in_window && (key < 0 || sees(batch, r, query, key));
        if (!is_seen) tile.scores[j * ROWS + i] = LOWEST;
      }
    }
    std::fill(tile.scores + end * ROWS, tile.scores + KEYS * ROWS, LOWEST);
    std::fill(tile.values + end * tile.size, tile.values + KEYS * tile.size, 0.0f);
  }

  void store(const Tile& tile, const Request& r, int64_t head, int64_t first,
             int64_t count) const {
    auto* out = reinterpret_cast<Element*>(layer.out);
    for (int64_t i = 0; i < count; ++i) {
      auto* row = out + (r.begin + (first + i) / group) * layer.out_row_stride +
                  (head * group + (first + i) % group) * layer.out_head_stride;
      for (int64_t d = 0; d < tile.size; ++d) {
        from_float(tile.out[d * ROWS + i] / tile.total[i], row + d);
      }
    }
  }

  // Computes one tile: the rows from `first` on of a request and a KV head.
  void attend(Tile& tile, const Request& r, int64_t head, int64_t first) const {
    const int64_t count = std::min(ROWS, r.queries * group - first);
    if (count <= 0) return;
    load_queries(tile, r, head, first, count);
    std::fill_n(tile.out, tile.size * ROWS, 0.0f);
    std::fill_n(tile.top, ROWS, LOWEST);
    std::fill_n(tile.total, ROWS, 0.0f);
    for (int64_t i = 0; i < count && layer.sinks != nullptr; ++i) {
      tile.top[i] = layer.sinks[head * group + (first + i) % group];
      tile.total[i] = 1.0f;
    }
    const int64_t end = r.prefix + r.keys, window = layer.window;
    int64_t position = window ? std::max<int64_t>(r.prefix - window + 1, 0) : 0;
    for (position -= position % KEYS; position < end; position += KEYS) {
      load_keys(tile, r, head, position);
      kernels.score(tile);
      const bool hides = window || position + KEYS > r.prefix;
      if (hides) hide_keys(tile, r, first, count, position);
      kernels.add_values(tile);
    }
    store(tile, r, head, first, count);
  }
};

// ---- all tiles, distributed over threads ----

template <class Element, class Stored>
struct Work {
  Attention<Element, Stored> attention;
  std::atomic<int64_t> next{0};

  static void run(void* self) {
    auto& work = *static_cast<Work*>(self);
    const auto& [batch, cache, layer, scale, group, kernels] = work.attention;
    const int64_t tiles = (batch.max_query_len * group + ROWS - 1) / ROWS;
    const int64_t each = cache.kv_heads * tiles, count = batch.num_reqs * each;
    Tile tile(cache.size);
    for (int64_t at; (at = work.next++) < count;) {
      const Request r = locate(batch, at / each);
      work.attention.attend(tile, r, at % each / tiles, at % tiles * ROWS);
    }
  }
};

template <class Element, class Stored = Element>
void attend_rows(const TreeBatch& batch, const TreeCache& cache, const TreeLayer& layer,
                 float scale) {
  if (cache.values[0] != nullptr && sizeof(Stored) > 1) {
    return attend_rows<Element, uint8_t>(batch, cache, layer, scale);
  }
  Work<Element, Stored> work{{batch, cache, layer, scale, layer.heads / cache.kv_heads}};
  if (GOMP_parallel != nullptr) return GOMP_parallel(work.run, &work, 0, 0);
  work.run(&work);
}

// ---- accepted paths, to the slots of their positions ----

template <class Element>
void move(const TreeCache& cache, int64_t from, int64_t to) {
  const int64_t slots = cache.block_size, size = cache.size;
  auto* kv = reinterpret_cast<Element*>(cache.kv_cache);
  for (int64_t head = 0; head < cache.kv_heads; ++head) {
    auto* block = kv + head * cache.head_stride;
    const auto* source = block + from / slots * cache.block_stride;
    auto* target = block + to / slots * cache.block_stride;
    for (const int32_t* part : {cache.places, cache.places + slots * size}) {
      const int32_t* read = part + from % slots * size;
      const int32_t* write = part + to % slots * size;
      for (int64_t d = 0; d < size; ++d) target[write[d]] = source[read[d]];
    }
  }
}

template <class Element>
void move_all(const TreeCache& cache, const TreePaths& paths, int64_t kv_group) {
  for (int64_t req = 0; req < paths.num_reqs; ++req) {
    const int64_t* slots =
        paths.slot_mappings + kv_group * paths.slot_stride + paths.first_rows[req];
    const int32_t* path = paths.path + req * (paths.depth + 1);
    // From the root on: a node's slot is never before that of its depth, so none is
    // overwritten before it has been read.
    for (int64_t depth = 1; depth < paths.num_sampled[req]; ++depth) {
      if (path[depth] != depth) move<Element>(cache, slots[path[depth]], slots[depth]);
    }
  }
}

}  // namespace

extern "C" {

// For Python to compare with its own.
extern const uint32_t structs_version = STRUCTS_VERSION;

// `dtype`: of queries and output, its place in DTYPES of cpu.py.
void attend(const TreeBatch* batch, const TreeCache* cache, const TreeLayer* layer,
            float scale, int64_t dtype) {
  if (dtype == 0) return attend_rows<float>(*batch, *cache, *layer, scale);
  if (dtype == 1) return attend_rows<BFloat16>(*batch, *cache, *layer, scale);
  attend_rows<Half>(*batch, *cache, *layer, scale);
}

void move_paths(const TreeCache* cache, const TreePaths* paths, int64_t kv_group,
                int64_t bytes) {
  if (bytes == 1) return move_all<uint8_t>(*cache, *paths, kv_group);
  if (bytes == 2) return move_all<uint16_t>(*cache, *paths, kv_group);
  move_all<uint32_t>(*cache, *paths, kv_group);
}

}  // extern "C"

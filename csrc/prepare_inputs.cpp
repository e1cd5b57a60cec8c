// SPDX-License-Identifier: Apache-2.0
// The input kernel for CPU tensors: one call turns the verified batch, or the previous
// pass, into the draft batch.
//
// Equal, bit for bit, to the Triton kernel in
// vllm/v1/worker/gpu/spec_decode/unified/inputs.py, whose names and order it keeps;
// layout.py beside it defines the slots, native.py calls this. Plain C++17 and plain C
// data: it does not depend on the version of torch or of Python.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>

// The arguments from Python: tuples of structs.py, each field one word of 64 bits.
#include "structs.h"

namespace {

constexpr int64_t PAD_SLOT = -1;

struct Kernel {
  const KVTables& tables;
  const DraftBatch& out;
  const char* const* sources;
  const FedStates* hidden;
  const Numbers& pass;
  int64_t element_size;
};

// Where a request's slots begin, how many there are, how many hold tokens that are
// known (`valid`), and the position of slot 0.
struct Request {
  int64_t req, state, first, count, valid, start;
};

// ---- requests; nullopt where padding begins ----

std::optional<Request> locate(const Kernel& k, const VerifiedBatch& src, int64_t req) {
  const int64_t begin = src.query_start_loc[req], end = src.query_start_loc[req + 1];
  if (begin == end) return std::nullopt;
  const int64_t extra = k.pass.width - k.pass.shift;
  return Request{req,
                 src.idx_mapping[req],
                 begin + req * extra,
                 end - begin + extra,
                 end - begin - src.num_rejected[req],
                 src.positions[begin]};
}

std::optional<Request> locate(const Kernel& k, const PreviousDrafts&, int64_t req) {
  const int64_t origin = k.out.first_positions[req], width = k.pass.width;
  if (origin < 0) return std::nullopt;
  return Request{req,
                 k.out.idx_mapping[req],
                 req * (2 * width - 1),
                 2 * width - 1,
                 width - 1 + k.pass.shift,
                 origin + (k.pass.draft_pass - 1) * width + 1};
}

// ---- known tokens; the caller handles the masks after them ----

// Row of the verified batch that holds token `at` of a request's valid tokens.
int64_t verified_row(const VerifiedBatch& src, const Request& r, int64_t at) {
  return src.query_start_loc[r.req] + at;
}

int32_t next_token(const VerifiedBatch& src, const Request& r) {
  if (r.state < 0) return 0;
  if (src.num_sampled[r.req] > 0) {
    return static_cast<int32_t>(src.last_sampled[r.state]);
  }
  return src.next_prefill_tokens[r.state];
}

int32_t known_token(const Kernel& k, const VerifiedBatch& src, const Request& r,
                    int64_t slot) {
  const int64_t at = slot + k.pass.shift;
  if (at == r.valid) return next_token(src, r);
  return src.input_ids[verified_row(src, r, at)];
}

int32_t known_token(const Kernel& k, const PreviousDrafts& src, const Request& r,
                    int64_t slot) {
  const int64_t done = (k.pass.draft_pass - 1) * k.pass.width;
  return static_cast<int32_t>(
      src.draft_tokens[r.req * src.stride + done + slot]);
}

// ---- M-RoPE positions: the target's own for the tokens of its batch ----

int32_t rope_delta(const Kernel&, const VerifiedBatch& src, const Request& r) {
  return r.state < 0 ? 0 : src.rope_deltas[r.state];
}

int32_t rope_delta(const Kernel& k, const PreviousDrafts&, const Request& r) {
  return r.state < 0 ? 0 : k.out.rope_deltas[r.req];
}

int64_t rope_position(const Kernel& k, const VerifiedBatch& src, const Request& r,
                      int64_t slot, int64_t dim) {
  if (slot >= r.valid) return r.start + slot + rope_delta(k, src, r);
  return src.rope_positions[dim * k.pass.rope_stride + verified_row(src, r, slot)];
}

int64_t rope_position(const Kernel& k, const PreviousDrafts& src, const Request& r,
                      int64_t slot, int64_t) {
  return r.start + slot + rope_delta(k, src, r);
}

// ---- KV slots: PAD_SLOT where the request owns no block ----

int32_t num_blocks(const Kernel& k, const VerifiedBatch&, const Request& r,
                   int64_t group) {
  if (r.state < 0) return 0;
  return k.tables.num_blocks[group * k.tables.num_blocks_stride + r.state];
}

int32_t num_blocks(const Kernel& k, const PreviousDrafts&, const Request& r, int64_t group) {
  if (r.state < 0) return 0;
  return k.out.num_blocks[group * k.out.max_num_reqs + r.req];
}

// The id of a request's block number `block`; 0, the null block, if it has none there.
// The null block also replaces blocks that were freed.
template <class Source>
int64_t block_id(const Kernel& k, const Source& src, const Request& r, int64_t block,
                 int64_t group) {
  if (block < 0 || block >= num_blocks(k, src, r, group)) return 0;
  const auto* table = reinterpret_cast<const int32_t*>(k.tables.block_tables[group]);
  return table[r.state * k.tables.strides[group] + block];
}

template <class Source>
int64_t kv_slot(const Kernel& k, const Source& src, const Request& r, int64_t position,
                int64_t group) {
  const int64_t size = k.tables.block_sizes[group];
  const int64_t id = block_id(k, src, r, position / size, group);
  return id > 0 ? id * size + position % size : PAD_SLOT;
}

// ---- hidden states: copied, or from the fallback where no source has one ----

constexpr int64_t COPIED = -1;

// The row of the fallback that is a slot's hidden state, or COPIED.
int64_t fallback_row(const Kernel& k, const VerifiedBatch& src, const Request& r,
                     int64_t slot) {
  if (k.pass.shift == 1) return slot + 1 > r.valid ? 0 : COPIED;
  if (slot > 0) return COPIED;
  if (r.start == 0) return 0;
  const int64_t group = k.hidden->kv_group, before = r.start - 1;
  const int64_t size = k.tables.block_sizes[group];
  const int64_t id = block_id(k, src, r, before / size, group);
  const int64_t row = 2 * id + (r.start % size != 0);
  return k.hidden->positions[row] == before ? row : 0;
}

int64_t fallback_row(const Kernel& k, const PreviousDrafts&, const Request& r, int64_t slot) {
  return k.pass.shift == 1 && slot + 1 > r.valid ? 0 : COPIED;
}

// Row of a source that has a slot's hidden state: that of the token before it.
int64_t source_row(const Kernel& k, const VerifiedBatch& src, const Request& r,
                   int64_t slot) {
  return verified_row(src, r, std::min(slot + k.pass.shift, r.valid) - 1);
}

int64_t source_row(const Kernel& k, const PreviousDrafts&, const Request& r,
                   int64_t slot) {
  return r.req * k.pass.width + std::min(slot, k.pass.width - 1);
}

template <class Source>
void store_hidden(const Kernel& k, const Source& src, const Request& r, int64_t slot) {
  const int64_t bytes = k.pass.size * k.element_size, sources = k.pass.sources;
  char* to = k.hidden->out + (r.first + slot) * sources * bytes;
  const int64_t other = fallback_row(k, src, r, slot);
  if (other != COPIED) {
    std::memcpy(to, k.hidden->fallback + other * sources * bytes, sources * bytes);
    return;
  }
  const int64_t row = source_row(k, src, r, slot);
  for (int64_t s = 0; s < sources; ++s) {
    std::memcpy(to + s * bytes, k.sources[s] + row * bytes, bytes);
  }
}

// ---- slots ----

template <class Source>
void store_slots(const Kernel& k, const Source& src, const Request& r) {
  for (int64_t slot = 0; slot < r.count; ++slot) {
    const int64_t at = slot + k.pass.shift, row = r.first + slot;
    const int64_t position = r.start + slot;
    const bool live = at < r.valid + k.pass.num_samples && position < k.pass.limit;
    const bool is_mask = at > r.valid;
    int64_t token = live && !is_mask ? known_token(k, src, r, slot) : 0;
    if (token >= k.pass.vocab_size) token = 0;
    if (live && is_mask) token = k.pass.mask_token_id;
    k.out.input_ids[row] = static_cast<int32_t>(token);
    k.out.positions[row] = live ? position : 0;
    for (int64_t dim = 0; dim < k.pass.dims; ++dim) {
      k.out.rope_positions[dim * (k.out.max_num_tokens + 1) + row] =
          live ? rope_position(k, src, r, slot, dim) : 0;
    }
    for (int64_t group = 0; group < k.pass.groups; ++group) {
      k.out.slot_mappings[group * k.out.max_num_tokens + row] =
          live ? kv_slot(k, src, r, position, group) : PAD_SLOT;
    }
    if (live && k.hidden) store_hidden(k, src, r, slot);
  }
}

// ---- requests: what sampling, attention and later passes read of each ----

void store_samples(const Kernel& k, const Request& r) {
  for (int64_t draft = 0; draft < k.pass.width; ++draft) {
    const int64_t slot = r.valid - k.pass.shift + draft;
    const int64_t to = r.req * k.pass.width + draft;
    const bool is_sampled =
        draft < k.pass.num_samples && r.start + slot < k.pass.limit;
    k.out.sample_rows[to] = r.first + slot;
    k.out.sample_positions[to] = r.start + slot + k.pass.shift;
    k.out.sample_requests[to] = is_sampled ? r.state : -1;
  }
}

void store_request(const Kernel& k, const VerifiedBatch& src, const Request& r) {
  k.out.first_positions[r.req] = r.start + r.valid - k.pass.shift;
  k.out.idx_mapping[r.req] = r.state;
  for (int64_t group = 0; group < k.pass.groups; ++group) {
    k.out.num_blocks[group * k.out.max_num_reqs + r.req] = num_blocks(k, src, r, group);
  }
  if (k.pass.dims > 0) k.out.rope_deltas[r.req] = rope_delta(k, src, r);
  if (r.state < 0) return;
  k.out.temperature[r.state] = src.temperature[r.state];
  k.out.seeds[r.state] = src.seeds[r.state];
}

// A later pass leaves them unchanged.
void store_request(const Kernel&, const PreviousDrafts&, const Request&) {}

void store_bounds(const Kernel& k, const Request& r) {
  k.out.query_start_loc[r.req] = static_cast<int32_t>(r.first);
  k.out.query_start_loc[r.req + 1] = static_cast<int32_t>(r.first + r.count);
  // Padding slots count too: the last query is the last key, so that causal attention
  // gives every valid slot exactly the keys before it.
  k.out.seq_lens[r.req] = static_cast<int32_t>(r.start + r.count);
}

// ---- tails: padding after the last request, up to what a graph replay reads ----

void store_tails(const Kernel& k, int64_t req, int64_t end) {
  const DraftBatch& out = k.out;
  const int64_t reqs = out.max_num_reqs, width = k.pass.width;
  const int64_t samples = reqs * width, rows = k.pass.num_padded_tokens;
  const auto pad = [](auto* tensor, int64_t from, int64_t to, int64_t value) {
    if (from < to) std::fill(tensor + from, tensor + to, value);
  };
  pad(out.query_start_loc, req + 1, reqs + 1, end);
  pad(out.seq_lens, req, reqs, 0);
  pad(out.first_positions, req, reqs, -1);
  pad(out.idx_mapping, req, reqs, -1);
  pad(out.sample_rows, req * width, samples, 0);
  pad(out.sample_positions, req * width, samples, 0);
  pad(out.sample_requests, req * width, samples, -1);
  pad(out.input_ids, end, rows, 0);
  pad(out.positions, end, rows, 0);
  for (int64_t dim = 0; dim < k.pass.dims; ++dim) {
    pad(out.rope_positions + dim * (out.max_num_tokens + 1), end, rows, 0);
  }
  for (int64_t group = 0; group < k.pass.groups; ++group) {
    pad(out.slot_mappings + group * out.max_num_tokens, end, rows, PAD_SLOT);
  }
}

template <class Source>
void prepare(const Kernel& k, const Source& src) {
  int64_t req = 0, end = 0;
  for (; req < k.pass.num_reqs; ++req) {
    const std::optional<Request> r = locate(k, src, req);
    if (!r) break;
    store_slots(k, src, *r);
    store_samples(k, *r);
    store_bounds(k, *r);
    store_request(k, src, *r);
    end = r->first + r->count;
  }
  store_tails(k, req, end);
}

}  // namespace

extern "C" {

// Which structs.h it was built with, for Python to compare with its own.
extern const uint32_t structs_id = STRUCTS_ID;

void prepare_first_pass(const VerifiedBatch* src, const KVTables* tables,
                        const DraftBatch* out, const char* const* sources,
                        const FedStates* hidden, const Numbers* pass,
                        int64_t element_size) {
  prepare(Kernel{*tables, *out, sources, hidden, *pass, element_size}, *src);
}

void prepare_later_pass(const PreviousDrafts* src, const KVTables* tables,
                        const DraftBatch* out, const char* const* sources,
                        const FedStates* hidden, const Numbers* pass,
                        int64_t element_size) {
  prepare(Kernel{*tables, *out, sources, hidden, *pass, element_size}, *src);
}

}  // extern "C"

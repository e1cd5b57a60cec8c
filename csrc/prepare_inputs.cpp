// SPDX-License-Identifier: Apache-2.0
// The input kernel for CPU tensors: one call from the verified batch, or from the pass
// before, to the draft batch.
//
// Equal, bit for bit, to the Triton kernel in
// vllm/v1/worker/gpu/spec_decode/unified/inputs.py, whose names and order it keeps;
// layout.py beside it says which slots there are, native.py calls this. Plain C++17 and
// plain C data: no version of torch or of Python is built in.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>

namespace {

constexpr int64_t PAD_SLOT = -1;

// What Python hands over: the fields of the NamedTuple of that name, in its order, each
// one word of 64 bits. `inputs.py` says what they hold and gives their shapes.
struct VerifiedBatch {
  const int32_t* input_ids;
  const int64_t* positions;
  const int32_t* query_start_loc;
  const int64_t* idx_mapping;
  const int32_t* num_sampled;
  const int32_t* num_rejected;
  const int64_t* last_sampled;
  const int32_t* next_prefill_tokens;
  const float* temperature;
  const int64_t* seeds;
};

struct Drafts {
  const int64_t* draft_tokens;
  int64_t draft_stride;
};

struct KVTables {
  const int32_t* const* block_table_ptrs;
  const int64_t* strides;
  const int32_t* block_sizes;
  const int32_t* num_blocks;
  int64_t num_blocks_stride;
};

struct Out {
  int32_t* input_ids;
  int64_t* positions;
  int64_t* slot_mappings;
  int64_t slot_mappings_stride;
  int32_t* query_start_loc;
  int32_t* seq_lens;
  int64_t* first_positions;
  int64_t* idx_mapping;
  int32_t* num_blocks;
  float* temperature;
  int64_t* seeds;
  int64_t* sample_rows;
  int64_t* sample_positions;
  int64_t* sample_requests;
  int64_t max_num_reqs;
};

struct Hidden {
  const char* stand_ins;
  int64_t kv_group;
  char* out;
};

struct Pass {
  int64_t num_reqs;
  int64_t draft_pass;
  int64_t num_samples;
  int64_t num_padded_tokens;
  int64_t limit;
  int64_t mask_token_id;
  int64_t shift;
  int64_t width;
  int64_t groups;
  int64_t num_sources;
  int64_t source_bytes;  // of a row of one source
};

struct Kernel {
  const KVTables& tables;
  const Out& out;
  const char* const* sources;
  const Hidden* hidden;
  const Pass& pass;
};

// Where a request's slots begin, how many there are, how many hold tokens that are
// known (`valid`), the position of slot 0, and the row of a source, of which slot 0 with
// a token_shift has the hidden state, and slot 1 without one.
struct Request {
  int64_t req, state, first, count, valid, start, source;
};

// ---- requests; none where padding begins ----

std::optional<Request> locate(const Kernel& k, const VerifiedBatch& src, int64_t req) {
  const int64_t begin = src.query_start_loc[req], end = src.query_start_loc[req + 1];
  if (begin == end) return std::nullopt;
  const int64_t extra = k.pass.width - k.pass.shift;
  return Request{req,
                 src.idx_mapping[req],
                 begin + req * extra,
                 end - begin + extra,
                 end - begin - src.num_rejected[req],
                 src.positions[begin],
                 begin - 1};
}

std::optional<Request> locate(const Kernel& k, const Drafts&, int64_t req) {
  const int64_t origin = k.out.first_positions[req], width = k.pass.width;
  if (origin < 0) return std::nullopt;
  return Request{req,
                 k.out.idx_mapping[req],
                 req * (2 * width - 1),
                 2 * width - 1,
                 width - 1 + k.pass.shift,
                 origin + (k.pass.draft_pass - 1) * width + 1,
                 req * width - k.pass.shift};
}

// ---- tokens; the masks behind them are the caller's ----

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
  return src.input_ids[src.query_start_loc[r.req] + at];
}

int32_t known_token(const Kernel& k, const Drafts& src, const Request& r,
                    int64_t slot) {
  const int64_t done = (k.pass.draft_pass - 1) * k.pass.width;
  return static_cast<int32_t>(
      src.draft_tokens[r.req * src.draft_stride + done + slot]);
}

// ---- KV slots: PAD wherever the request owns no block ----

int32_t num_blocks(const Kernel& k, const VerifiedBatch&, const Request& r,
                   int64_t group) {
  if (r.state < 0) return 0;
  return k.tables.num_blocks[group * k.tables.num_blocks_stride + r.state];
}

int32_t num_blocks(const Kernel& k, const Drafts&, const Request& r, int64_t group) {
  if (r.state < 0) return 0;
  return k.out.num_blocks[group * k.out.max_num_reqs + r.req];
}

// The id of a request's block, counted from its first; 0, the null block, which also
// stands for blocks given back, where it holds none.
template <class Source>
int64_t block_id(const Kernel& k, const Source& src, const Request& r, int64_t block,
                 int64_t group) {
  if (block < 0 || block >= num_blocks(k, src, r, group)) return 0;
  const int32_t* table = k.tables.block_table_ptrs[group];
  return table[r.state * k.tables.strides[group] + block];
}

template <class Source>
int64_t kv_slot(const Kernel& k, const Source& src, const Request& r, int64_t position,
                int64_t group) {
  const int64_t size = k.tables.block_sizes[group];
  const int64_t id = block_id(k, src, r, position / size, group);
  return id > 0 ? id * size + position % size : PAD_SLOT;
}

// ---- hidden states: copied, or those that stand in where no source has one ----

constexpr int64_t COPIED = -1;

// The row that stands in for a slot's hidden state, or COPIED.
int64_t stand_in(const Kernel& k, const VerifiedBatch& src, const Request& r,
                 int64_t slot) {
  if (k.pass.shift == 1) return slot + 1 > r.valid ? 0 : COPIED;
  if (slot > 0) return COPIED;
  const int64_t group = k.hidden->kv_group;
  return block_id(k, src, r, r.start / k.tables.block_sizes[group] - 1, group);
}

int64_t stand_in(const Kernel& k, const Drafts&, const Request& r, int64_t slot) {
  return k.pass.shift == 1 && slot + 1 > r.valid ? 0 : COPIED;
}

template <class Source>
void store_hidden(const Kernel& k, const Source& src, const Request& r, int64_t slot) {
  const int64_t bytes = k.pass.source_bytes, sources = k.pass.num_sources;
  char* to = k.hidden->out + (r.first + slot) * sources * bytes;
  const int64_t other = stand_in(k, src, r, slot);
  if (other != COPIED) {
    std::memcpy(to, k.hidden->stand_ins + other * sources * bytes, sources * bytes);
    return;
  }
  const int64_t row = r.source + std::min(slot + k.pass.shift, r.valid);
  for (int64_t s = 0; s < sources; ++s) {
    std::memcpy(to + s * bytes, k.sources[s] + row * bytes, bytes);
  }
}

// Whether the step before has laid slot 0 out already.
bool is_laid_out(const Kernel& k, const VerifiedBatch&, const Request& r) {
  if (!k.hidden || k.pass.shift == 1) return false;
  return r.start % k.tables.block_sizes[k.hidden->kv_group] != 0;
}

bool is_laid_out(const Kernel&, const Drafts&, const Request&) { return false; }

// ---- slots ----

template <class Source>
void store_slots(const Kernel& k, const Source& src, const Request& r) {
  const int64_t first_new = is_laid_out(k, src, r) ? 1 : 0;
  for (int64_t slot = 0; slot < r.count; ++slot) {
    const int64_t at = slot + k.pass.shift, row = r.first + slot;
    const int64_t position = r.start + slot;
    const bool live = slot >= first_new && at < r.valid + k.pass.num_samples &&
                      position < k.pass.limit;
    const bool is_mask = at > r.valid;
    int64_t token = 0;
    if (live) token = is_mask ? k.pass.mask_token_id : known_token(k, src, r, slot);
    k.out.input_ids[row] = static_cast<int32_t>(token);
    k.out.positions[row] = live ? position : 0;
    for (int64_t group = 0; group < k.pass.groups; ++group) {
      k.out.slot_mappings[group * k.out.slot_mappings_stride + row] =
          live ? kv_slot(k, src, r, position, group) : PAD_SLOT;
    }
    if (live && k.hidden) store_hidden(k, src, r, slot);
  }
}

// ---- requests: what sampling, attention and later passes read of one ----

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
  if (r.state < 0) return;
  k.out.temperature[r.state] = src.temperature[r.state];
  k.out.seeds[r.state] = src.seeds[r.state];
}

void store_request(const Kernel&, const Drafts&, const Request&) {}  // stays as it is

void store_bounds(const Kernel& k, const Request& r) {
  k.out.query_start_loc[r.req] = static_cast<int32_t>(r.first);
  k.out.query_start_loc[r.req + 1] = static_cast<int32_t>(r.first + r.count);
  // Padding slots count too: the last query is the last key, so that causal attention
  // gives every valid slot exactly the keys before it.
  k.out.seq_lens[r.req] = static_cast<int32_t>(r.start + r.count);
}

// ---- tails: what lies behind the last request, up to where a replay reads ----

void store_tails(const Kernel& k, int64_t req, int64_t end) {
  const Out& out = k.out;
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
  for (int64_t group = 0; group < k.pass.groups; ++group) {
    pad(out.slot_mappings + group * out.slot_mappings_stride, end, rows, PAD_SLOT);
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

// Sizes in bytes of the structs above, for Python to compare with its own.
extern const int64_t struct_sizes[6] = {sizeof(VerifiedBatch), sizeof(Drafts),
                                        sizeof(KVTables),      sizeof(Out),
                                        sizeof(Hidden),        sizeof(Pass)};

void prepare_first_pass(const VerifiedBatch* src, const KVTables* tables,
                        const Out* out, const char* const* sources,
                        const Hidden* hidden, const Pass* pass) {
  prepare(Kernel{*tables, *out, sources, hidden, *pass}, *src);
}

void prepare_later_pass(const Drafts* src, const KVTables* tables, const Out* out,
                        const char* const* sources, const Hidden* hidden,
                        const Pass* pass) {
  prepare(Kernel{*tables, *out, sources, hidden, *pass}, *src);
}

}  // extern "C"

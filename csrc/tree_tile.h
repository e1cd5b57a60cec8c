// SPDX-License-Identifier: Apache-2.0
// The vector code for a tile of tree_attention.cpp, which includes it once per kind of
// CPU, each time in another namespace: no include guard.

typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

inline Floats* vectors(float* rows) { return reinterpret_cast<Floats*>(rows); }

// Adds to sums[AT_ONCE, ROWS] the product of a[AT_ONCE, depth], whose strides are given,
// and rows[depth, ROWS].
inline void add_product(const float* a, int64_t stride, int64_t step, const float* rows,
                        int64_t depth, float* sums) {
  Floats kept[AT_ONCE][VECTORS];
  std::memcpy(kept, sums, sizeof(kept));
  for (int64_t k = 0; k < depth; ++k) {
    const Floats* row = reinterpret_cast<const Floats*>(rows + k * ROWS);
    for (int64_t i = 0; i < AT_ONCE; ++i) {
      const float weight = a[i * stride + k * step];
      for (int64_t v = 0; v < VECTORS; ++v) kept[i][v] += weight * row[v];
    }
  }
  std::memcpy(sums, kept, sizeof(kept));
}

// Replaces x by exp(x), x <= 0, within two units of the last place (the method of
// Cephes' expf).
inline void exponentiate(Floats& x) {
  const Floats lowest = Floats{} - 87.0f;
  const Ints is_zero = x < lowest;
  x = is_zero ? lowest : x;
  const Floats shifted = x * 1.44269504f + 12582912.0f;  // its last bits are n
  const Floats n = shifted - 12582912.0f;
  const Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  reinterpret_cast<Ints&>(p) += reinterpret_cast<const Ints&>(shifted) << 23;
  x = is_zero ? Floats{} : p;
}

void score(Tile& tile) {
  std::memset(tile.scores, 0, KEYS * ROWS * sizeof(float));
  for (int64_t key = 0; key < KEYS; key += AT_ONCE) {
    add_product(&tile.keys[key], 1, KEYS, tile.query, tile.size,
                &tile.scores[key * ROWS]);
  }
}

// Turns scores into weights, and rescales earlier sums to the new largest scores.
inline void weigh(Tile& tile, int64_t v) {
  Floats* scores = vectors(tile.scores) + v;
  Floats &top = vectors(tile.top)[v], &total = vectors(tile.total)[v], shrink = top;
  for (int64_t key = 0; key < KEYS; ++key) {
    const Floats score = scores[key * VECTORS];
    top = score > top ? score : top;
  }
  shrink -= top;
  exponentiate(shrink);
  total *= shrink;
  for (int64_t key = 0; key < KEYS; ++key) {
    Floats& score = scores[key * VECTORS];
    score -= top;
    exponentiate(score);
    total += score;
  }
  Floats* out = vectors(tile.out) + v;
  for (int64_t dim = 0; dim < tile.size; ++dim) out[dim * VECTORS] *= shrink;
}

void add_values(Tile& tile) {
  for (int64_t v = 0; v < VECTORS; ++v) weigh(tile, v);
  for (int64_t dim = 0; dim < tile.size; dim += AT_ONCE) {
    add_product(&tile.values[dim], 1, tile.size, tile.scores, KEYS,
                &tile.out[dim * ROWS]);
  }
}

constexpr TileKernels KERNELS{score, add_values};

// Copies whole blocks of one or two planes: within a pool, into it, or out of it.
//
// source_a, source_b [.., A or B]: words of 16 bytes, of the pool or of blocks beside it; B = 0: there is one plane;
// pool_a, pool_b [blocks, A or B]: targets in place if INTO_POOL; moves [n, 2]: block of the source and of the target.
// No block may be both; after: token of the last kernel that touched the pool
// copy_a, copy_b [n, A or B]: targets unless INTO_POOL, else one zero each; done [1]: the token
//
// grid (max(A, B), n, 1), threadgroup (up to 256, 1, 1): a thread moves a word of each plane
const size_t word = thread_position_in_grid.x;
const size_t move = thread_position_in_grid.y;
const size_t from = size_t(moves[move * 2]);
const size_t to = size_t(moves[move * 2 + 1]);
using Word = vec<uint, 4>;
if (word < A) {
  device Word* target = INTO_POOL ? (device Word*)pool_a : (device Word*)copy_a;
  target[to * A + word] = ((const device Word*)source_a)[from * A + word];
}
if (word < B) {
  device Word* target = INTO_POOL ? (device Word*)pool_b : (device Word*)copy_b;
  target[to * B + word] = ((const device Word*)source_b)[from * B + word];
}
if (word == 0 && move == 0) {
  done[0] = 1;
  if (INTO_POOL) {
    copy_a[0] = 0;
  }
  if (INTO_POOL || B == 0) {
    copy_b[0] = 0;
  }
}

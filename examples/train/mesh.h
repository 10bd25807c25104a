/* A mesh of D x R ranks: D groups, each a ring of R ranks that share every sequence. Rank number is
 * group * R + place. What the ranks of a step send to each other is here; a rank alone sends
 * nothing.
 *
 * The weights are in chunks of TRAIN_CHUNK. A rank owns a run of chunks: it adds up their
 * gradients, has the optimiser's averages of them, and steps them. Sums have one order: the
 * sequences of a step are in `groups` groups, each with TRAIN_LANES lanes. A mesh of D groups of
 * ranks computes groups / D of them one after the other. A rank adds up its own lanes as far as
 * they are neighbours in the tree: these are its leaves, one for each of its groups of sequences
 * and each piece of its shard. The owner of a chunk gets the leaves of all ranks and adds them up
 * in the same tree. */
#if !defined(TRAIN_MESH_H)
#define TRAIN_MESH_H

#include "net.h"

enum { MESH_PIECE = 1 << 18, MESH_GROUPS = 16 };

typedef struct mesh {
    int32_t rank, ranks;               /* of all */
    int32_t D, R, group, place;
    int64_t groups, pieces;            /* of sequences, in a step; of a rank's shard */
    ranks_net all, part;               /* part: of the group; not used if it is all or one */
    const ra_transport *wire, *ring;   /* null: one rank */
    ra_transport_op *op;               /* [2] */
    int unsafe;                        /* the transport may still use op */
    char why[RANKS_WHY];               /* of the first failure */
} mesh;

/* The bytes of a rank's chunks, in an array of `each` bytes per chunk and `bytes` in all. */
typedef struct mesh_run { size_t at, bytes; } mesh_run;

static inline mesh_run mesh_own(const mesh *m, int rank, int64_t chunks, size_t each,
                                size_t bytes) {
    mesh_run r = { (size_t)(chunks * rank / m->ranks) * each, 0 };
    size_t end = (size_t)(chunks * (rank + 1) / m->ranks) * each;
    if (end > bytes) end = bytes;
    if (r.at > end) r.at = end;
    r.bytes = end - r.at;
    return r;
}

static inline ra_status mesh_swap(mesh *m, int to, const void *out, size_t out_bytes, int from,
                                  void *in, size_t in_bytes) {
    ra_status s = RA_OK;
    for (size_t at = 0; !s && (at < out_bytes || at < in_bytes); at += MESH_PIECE) {
        const size_t o = out_bytes > at ? out_bytes - at : 0, i = in_bytes > at ? in_bytes - at : 0;
        const ranks_parcel p = { to, from, (const uint8_t *)out + at, (uint8_t *)in + at,
                                 o < MESH_PIECE ? o : MESH_PIECE, i < MESH_PIECE ? i : MESH_PIECE };
        s = ranks_hop(m->wire, m->op, &p, m->why);
    }
    m->unsafe = m->unsafe || s == RA_E_UNSAFE;
    return s;
}

/* Rank 0's bytes become those of all. */
static inline ra_status mesh_tell(mesh *m, void *data, size_t bytes) {
    ra_status s = RA_OK;
    if (m->rank) return mesh_swap(m, 0, data, 0, 0, data, bytes);
    for (int q = 1; q < m->ranks && !s; q++) s = mesh_swap(m, q, data, bytes, 0, data, 0);
    return s;
}

/* all: [ranks][bytes]; a rank's own are there already. */
static inline ra_status mesh_show(mesh *m, void *all, size_t bytes) {
    uint8_t *a = (uint8_t *)all;
    ra_status s = RA_OK;
    for (int far = 1; far < m->ranks && !s; far++) {
        const int to = (m->rank + far) % m->ranks, from = (m->rank + m->ranks - far) % m->ranks;
        s = mesh_swap(m, to, a + (size_t)m->rank * bytes, bytes, from, a + (size_t)from * bytes,
                      bytes);
    }
    return s;
}

/* Every rank gets all chunks from their owners. */
static inline ra_status mesh_spread(mesh *m, void *data, int64_t chunks, size_t each,
                                    size_t bytes) {
    const mesh_run mine = mesh_own(m, m->rank, chunks, each, bytes);
    uint8_t *p = (uint8_t *)data;
    ra_status s = RA_OK;
    for (int far = 1; far < m->ranks && !s; far++) {
        const int to = (m->rank + far) % m->ranks, from = (m->rank + m->ranks - far) % m->ranks;
        const mesh_run theirs = mesh_own(m, from, chunks, each, bytes);
        s = mesh_swap(m, to, p + mine.at, mine.bytes, from, p + theirs.at, theirs.bytes);
    }
    return s;
}

/* Rank 0 gets all chunks from their owners, or (out) gives them. own: of this rank. */
static inline ra_status mesh_first(mesh *m, void *all, void *own, int64_t chunks, size_t each,
                                   size_t bytes, int out) {
    const mesh_run mine = mesh_own(m, m->rank, chunks, each, bytes);
    uint8_t *p = (uint8_t *)all;
    ra_status s = RA_OK;
    if (m->rank) return mesh_swap(m, 0, own, out ? 0 : mine.bytes, 0, own, out ? mine.bytes : 0);
    if (out) memcpy(own, p + mine.at, mine.bytes);
    else memcpy(p + mine.at, own, mine.bytes);
    for (int q = 1; q < m->ranks && !s; q++) {
        const mesh_run r = mesh_own(m, q, chunks, each, bytes);
        s = mesh_swap(m, q, p + r.at, out ? r.bytes : 0, q, p + r.at, out ? 0 : r.bytes);
    }
    return s;
}

/* -------------------------------------------------------------------------- gradients */
static inline int64_t mesh_leaves(const mesh *m) { return m->groups / m->D * m->pieces; }

/* Where leaf i of a rank is among those of all: groups of sequences, then places in a sequence. */
static inline int64_t mesh_leaf(const mesh *m, int rank, int64_t i) {
    const int64_t group = rank / m->R * (m->groups / m->D) + i / m->pieces, r = rank % m->R;
    const int64_t place = i % m->pieces ? 2 * m->R - 1 - r : r;
    return group * m->R * m->pieces + place;
}

/* The leaves of all ranks, of the chunks that this rank owns: to[mesh_leaf][n->owned]. leaf: this
 * rank's, [mesh_leaves][size]. Then their sum is in `to`. */
static inline ra_status mesh_reduce(mesh *m, const net *n, const float *leaf, float *to) {
    const int64_t chunks = net_chunks(n), leaves = mesh_leaves(m);
    const size_t each = TRAIN_CHUNK * sizeof(float), bytes = (size_t)n->size * sizeof(float);
    ra_status s = RA_OK;
    for (int64_t i = 0; i < leaves; i++)
        memcpy(to + mesh_leaf(m, m->rank, i) * n->owned, leaf + i * n->size + n->own,
               (size_t)n->owned * sizeof *to);
    for (int far = 1; far < m->ranks && !s; far++) {
        const int q = (m->rank + far) % m->ranks, from = (m->rank + m->ranks - far) % m->ranks;
        const mesh_run theirs = mesh_own(m, q, chunks, each, bytes);
        for (int64_t i = 0; i < leaves && !s; i++)
            s = mesh_swap(m, q, (const uint8_t *)(leaf + i * n->size) + theirs.at, theirs.bytes,
                          from, to + mesh_leaf(m, from, i) * n->owned,
                          (size_t)n->owned * sizeof *to);
    }
    if (!s) train_tree_of(to, m->groups * m->R * m->pieces, n->owned);
    return s;
}

/* -------------------------------------------------------------------------- begin and end */
/* What all ranks must have in common: names and numbers. */
static inline ra_status mesh_agree(mesh *m, const uint64_t *x, const char *const *names, int n,
                                   char *why) {
    uint64_t all[RANKS_MOST * 8];
    memcpy(all + m->rank * n, x, (size_t)n * sizeof *x);
    const ra_status s = mesh_show(m, all, (size_t)n * sizeof *x);
    for (int q = 0; q < m->ranks && !s; q++)
        for (int i = 0; i < n; i++)
            if (all[q * n + i] != x[i]) {
                snprintf(why, RANKS_WHY, "rank %d differs from rank %ld in %s", q, (long)m->rank,
                         names[i]);
                return RA_E_MISMATCH;
            }
    return s;
}

/* Joins the others. d: of all ranks; the ring of a group is one more. groups: of sequences. */
static inline ra_status mesh_open(mesh *m, const ranks_desc *d, int32_t D, ra_world *world,
                                  char *why) {
    ranks_desc part = *d;
    char name[64];
    uint64_t here[RANKS_MOST] = { 0 };
    ra_status s = RA_OK;
    m->rank = d->rank;
    m->ranks = d->ranks;
    m->D = D;
    m->R = d->ranks / D;
    m->group = d->rank / m->R;
    m->place = d->rank % m->R;
    m->op = (ra_transport_op *)calloc(2, sizeof *m->op);
    if (!m->op) return ranks_refuse(why, RA_E_NOMEM, "ranks", "no memory");
    if (m->ranks > 1) s = ranks_open(&m->all, d, why);
    m->wire = m->ring = m->all.wire;
    if (!s && m->ranks > 1) s = mesh_show(m, here, sizeof *here);    /* all have left ranks_open */
    if (s || D == 1) return s;
    snprintf(name, sizeof name, "%.40s.%ld", d->name ? d->name : "", (long)m->group);
    part.name = name;
    part.first = m->group * m->R;
    part.rank = m->place;
    part.ranks = m->R;
    part.ring = 1;
    part.world = world;
    m->ring = NULL;
    if (m->R > 1 || d->kind == RANKS_MPIRUN) s = ranks_open(&m->part, &part, why);
    if (m->R > 1) m->ring = m->part.wire;
    return s;
}

/* After its rings. */
static inline ra_status mesh_close(mesh *m) {
    const ra_status a = ranks_close(&m->part), b = ranks_close(&m->all);
    if (!m->unsafe) free(m->op);
    return a ? a : b;
}

#endif

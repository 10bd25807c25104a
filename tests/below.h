/* sendrecv by the post and wait of another transport. Include it after ringattn.h. */
#ifndef RINGATTN_TESTS_BELOW_H
#define RINGATTN_TESTS_BELOW_H

#include <string.h>

/* The receive and the send of a sendrecv as ops; returns how many there are. */
static inline int below_ops(ra_transport_op op[2], ra_transport_op *list[2], int to, const void *s,
                            size_t s_len, int from, void *r, size_t r_len, uint64_t tag) {
    int n = 0;
    memset(op, 0, 2 * sizeof *op);
    for (int kind = RA_MSG_RECV; kind >= RA_MSG_SEND; kind--) {
        const int sends = kind == RA_MSG_SEND;
        if ((sends ? to : from) == RA_NO_PEER) continue;
        op[n].kind = (uint8_t)kind;
        op[n].peer = sends ? to : from;
        op[n].buf = sends ? (void *)(uintptr_t)s : r;
        op[n].len = sends ? s_len : r_len;
        op[n].tag = tag;
        list[n] = &op[n];
        n++;
    }
    return n;
}

/* ctx: the other ra_transport. If the send is cut short, the status of the receive counts. */
static inline int below_sendrecv(void *ctx, int to, const void *s, size_t s_len, int from, void *r,
                                 size_t r_len, uint64_t tag, int64_t deadline_ns) {
    const ra_transport *t = (const ra_transport *)ctx;
    ra_transport_op op[2], *list[2];
    const int n = below_ops(op, list, to, s, s_len, from, r, r_len, tag);
    int posted = RA_AGAIN, code = RA_OK, left = 1;
    while (left && code >= 0) {
        if (posted == RA_AGAIN) code = posted = t->post(t->ctx, list, n);
        if (code >= 0) code = t->wait(t->ctx, list, n, deadline_ns);
        left = 0;
        for (int i = 0; i < n && code >= 0; i++) {
            const int cut = op[i].kind == RA_MSG_SEND && op[i].state == RA_E_TRUNC;
            if (op[i].state < 0 && !cut) code = op[i].state;
            left += op[i].state != RA_MSG_DONE && !cut;
        }
        if (left && code >= 0 && ra_now_ns() > deadline_ns) code = RA_E_TIMEOUT;
    }
    if (code >= 0) return RA_OK;
    (void)t->abort(t->ctx, code);      /* takes back what is still posted */
    (void)t->poll(t->ctx, list, n);
    return code;
}

#endif

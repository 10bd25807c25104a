#if !defined(CACHE_SHIM_H)
#define CACHE_SHIM_H
#include "ringattn.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
typedef struct ra_cache_desc { int x; } ra_cache_desc;
typedef struct ra_cache { ra_desc d; int32_t P, r; } ra_cache;
static struct { pthread_mutex_t l; pthread_cond_t c; int n, gen; const ra_tensors *t[64]; } shim = { PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0, {0} };
static inline void shim_barrier(int P) { pthread_mutex_lock(&shim.l); int g = shim.gen; if (++shim.n == P) { shim.n = 0; shim.gen++; pthread_cond_broadcast(&shim.c);} while (g == shim.gen) pthread_cond_wait(&shim.c,&shim.l); pthread_mutex_unlock(&shim.l);}
static inline ra_status ra_cache_create(ra_cache **o, const ra_desc *d, const ra_transport *n, const ra_cache_desc *c) { (void)n;(void)c; *o = (ra_cache*)calloc(1,sizeof **o); (*o)->d=*d; (*o)->P=d->ranks?d->ranks:1; (*o)->r=d->rank; return RA_OK; }
static inline void ra_cache_destroy(ra_cache *c) { free(c); }
static inline int64_t ra_cache_rows(const ra_cache *c) { int64_t b=(c->d.kv_tokens+15)/16; return (b+c->P-1)/c->P*16; }
static inline int32_t ra_cache_owner(const ra_cache *c, int64_t p) { return (int32_t)(p/16%c->P); }
static inline int64_t ra_cache_row(const ra_cache *c, int64_t p) { return p/16/c->P*16+p%16; }
static inline int64_t shim_rb(int dt,int64_t n){return dt==RA_Q8_0?n/32*34:n*(dt==RA_F32?4:2);}
static inline ra_status ra_cache_store(const ra_cache *c, const ra_tensors *t, int32_t s, int64_t p, const float *k, const float *v) {
    (void)s; if (ra_cache_owner(c,p)!=c->r) return RA_OK;
    int64_t kr=shim_rb(c->d.k_dtype,(int64_t)c->d.kv_heads*c->d.k_dim), vr=shim_rb(c->d.v_dtype,(int64_t)c->d.kv_heads*c->d.v_dim), row=ra_cache_row(c,p);
    ra_convert((char*)(uintptr_t)t->k.data+row*kr,c->d.k_dtype,k,RA_F32,(int64_t)c->d.kv_heads*c->d.k_dim);
    return ra_convert((char*)(uintptr_t)t->v.data+row*vr,c->d.v_dtype,v,RA_F32,(int64_t)c->d.kv_heads*c->d.v_dim); }
static inline ra_status ra_infer(ra_cache *c, const ra_tensors *t, const int64_t *cached, const int64_t *fresh, int64_t dl) {
    (void)dl; int64_t n=0, all=cached[0]+fresh[0], rows=ra_cache_rows(c), H=c->d.q_heads, D=c->d.v_dim;
    int32_t *qp=(int32_t*)malloc(4*(size_t)fresh[0]), *kp=(int32_t*)malloc(4*(size_t)rows);
    float *o=(float*)malloc(4*(size_t)(fresh[0]*H*D)), *l=(float*)malloc(4*(size_t)(fresh[0]*H)), *l0=(float*)malloc(4*(size_t)(fresh[0]*H));
    ra_status s=RA_OK;
    for (int64_t i=0;i<fresh[0];i++) if (ra_cache_owner(c,cached[0]+i)==c->r) qp[n++]=(int32_t)(cached[0]+i);
    shim.t[c->r]=t; shim_barrier(c->P);
    for (int r=0;r<c->P&&n&&!s;r++) {
        int64_t kn=0; for (int64_t i=0;i<rows;i++) { int64_t p=(i/16*c->P+r)*16+i%16; if (p<all) kp[kn++]=(int32_t)p; }
        ra_desc d=c->d; ra_tensors u=*t; d.ranks=d.rank=0; d.tokens=n; d.kv_tokens=kn?kn:1; if(!kn){kp[0]=-1;kn=1;}
        u.k=shim.t[r]->k; u.v=shim.t[r]->v; u.q_pos.array=qp; u.q_pos.count=n; u.k_pos.array=kp; u.k_pos.count=kn;
        u.o.data=r?(void*)o:t->o.data; u.lse.data=r?l:l0;
        size_t b=ra_attention_bytes(&d,1); void *w=NULL; if (posix_memalign(&w,64,b+64)) abort();
        s=ra_attention(&d,&u,w,b,0,1); free(w);
        if (r&&!s) ra_merge((float*)t->o.data,l0,o,l,n*H,(int32_t)D);
    }
    shim_barrier(c->P); free(qp);free(kp);free(o);free(l);free(l0); return s; }
#endif

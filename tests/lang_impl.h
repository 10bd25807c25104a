/* What lang_impl.c offers to lang_main.c. */
#ifndef LANG_IMPL_H
#define LANG_IMPL_H
#include <stdint.h>
int32_t lang_other_version(void);
#endif

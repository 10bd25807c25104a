/* The second translation unit of the language matrix: the implementation for lang_main.c, or with
 * RINGATTN_STATIC a second copy. */
#ifndef LANG_HEADER
#define LANG_HEADER "ringattn.h"
#endif
#define RINGATTN_IMPLEMENTATION
#include LANG_HEADER
#include "lang_impl.h"

int32_t lang_other_version(void) {
    return ra_version();
}

/* CRC-32C by tables, as the library computes it where no instruction does. It is a separate
 * translation unit, because on this machine the library may have the instruction. */
#define RINGATTN_STATIC
#define RINGATTN_SCALAR
#define RINGATTN_IMPLEMENTATION
#include "ringattn.h"

uint32_t table_crc(const void *data, int64_t bytes);
uint32_t table_crc(const void *data, int64_t bytes) { return ra__crc(0, data, bytes); }

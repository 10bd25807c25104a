/* Names that headers of systems and of common libraries define as macros, for a program that
 * includes such a header before ringattn.h. The system headers that ringattn.h includes come first:
 * they have to live with these macros themselves. */
#ifndef RINGATTN_TESTS_LANG_MACROS_H
#define RINGATTN_TESTS_LANG_MACROS_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <sched.h>
#include <pthread.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/auxv.h>
#endif
#ifdef __x86_64__
#include <cpuid.h>
#include <immintrin.h>
#endif
#ifdef __aarch64__
#include <arm_neon.h>
#endif
#ifdef LANG_MAIN                       /* and what the program needs */
#include <stdio.h>
#include <math.h>
#endif

/* Single capitals: complex.h has I, Arduino F, others the rest. */
#define A 0wrong
#define B 0wrong
#define C 0wrong
#define D 0wrong
#define E 0wrong
#define F(x) 0wrong
#define G 0wrong
#define H 0wrong
#define I 0wrong
#define J 0wrong
#define K 0wrong
#define L 0wrong
#define M 0wrong
#define N 0wrong
#define O 0wrong
#define P 0wrong
#define Q 0wrong
#define R 0wrong
#define S 0wrong
#define T 0wrong
#define U 0wrong
#define V 0wrong
#define W 0wrong
#define X 0wrong
#define Y 0wrong
#define Z 0wrong
/* termios.h, sys/ioctl.h, curses.h */
#define B0 0wrong
#define B1 0wrong
#define B50 0wrong
#define B110 0wrong
#define NL0 0wrong
#define CR1 0wrong
#define BS0 0wrong
#define VT0 0wrong
#define FF0 0wrong
#define TAB0 0wrong
#define ECHO 0wrong
#define ERR 0wrong
#define OK 0wrong
#define clear() 0wrong
#define erase() 0wrong
#define move(y, x) 0wrong
#define refresh() 0wrong
#define scroll(w) 0wrong
#define timeout(x) 0wrong
#define raw() 0wrong
#define echo() 0wrong
/* Microsoft's windows.h, rpcndr.h, windef.h, wingdi.h, winnt.h */
#define small 0wrong
#define hyper 0wrong
#define near 0wrong
#define far 0wrong
#define pascal 0wrong
#define cdecl 0wrong
#define interface 0wrong
#define min(a, b) 0wrong
#define max(a, b) 0wrong
#define IN 0wrong
#define OUT 0wrong
#define OPTIONAL 0wrong
#define NEAR 0wrong
#define FAR 0wrong
#define CONST 0wrong
#define VOID 0wrong
#define ERROR 0wrong
#define DELETE 0wrong
#define CALLBACK 0wrong
#define STRICT 0wrong
#define TRUE 0wrong
#define FALSE 0wrong
#define RGB(r, g, b) 0wrong
#define DIFFERENCE 0wrong
#define ABSOLUTE 0wrong
#define RELATIVE 0wrong
#define OPAQUE 0wrong
#define TRANSPARENT 0wrong
#define IGNORE 0wrong
#define INFINITE 0wrong
#define NO_ERROR 0wrong
#define MAX_PATH 0wrong
/* sys/param.h, sys/sysmacros.h, sys/types.h, limits.h, values.h, math.h of old */
#define MIN(a, b) 0wrong
#define MAX(a, b) 0wrong
#define howmany(x, y) 0wrong
#define roundup(x, y) 0wrong
#define setbit(a, i) 0wrong
#define isset(a, i) 0wrong
#define major(x) 0wrong
#define minor(x) 0wrong
#define makedev(x, y) 0wrong
#define PAGE_SIZE 0wrong
#define BITS 0wrong
#define DOMAIN 0wrong
#define SING 0wrong
#define OVERFLOW 0wrong
#define UNDERFLOW 0wrong
#define TLOSS 0wrong
/* X11, Qt, complex.h, stdbool.h, AssertMacros.h, kernels */
#define None 0wrong
#define Bool 0wrong
#define Status 0wrong
#define Success 0wrong
#define Always 0wrong
#define True 0wrong
#define False 0wrong
#define Above 0wrong
#define Below 0wrong
#define Complex 0wrong
#define signals 0wrong
#define emit 0wrong
#define foreach 0wrong
#define forever 0wrong
#define complex 0wrong
#define imaginary 0wrong
#define check(x) 0wrong
#define verify(x) 0wrong
#define require(x, y) 0wrong
#define likely(x) 0wrong
#define unlikely(x) 0wrong
#define unix 0wrong
#define linux 0wrong
#define sun 0wrong
#define mips 0wrong
#define i386 0wrong
#define PI 0wrong
#define BLOCK 0wrong
#define LINE 0wrong
#define END 0wrong
#define EMPTY 0wrong
#define SWAP(a, b) 0wrong
#define ALIGN(x) 0wrong
#define ARRAY_SIZE(x) 0wrong

#endif

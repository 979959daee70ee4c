/* unicode.c - character classes from the generated table. Threads: any. */
#include "unicode.h"

#include <utf8proc.h>

#include "unicode_classes.inc"

uint8_t bd_unicode_class(uint32_t code_point) {
    if (code_point >= 0x110000) return 0;
    return class_blocks[class_block_of[code_point >> 7]][code_point & 127];
}

bool bd_unicode_is_word(uint32_t code_point) {
    if (bd_unicode_class(code_point) & BD_CLASS_LETTER) return true;
    if (code_point == 0x200c || code_point == 0x200d) return true;
    /* Circled and squared letters are Alphabetic without being letters. */
    if ((code_point >= 0x24b6 && code_point <= 0x24e9) ||
        (code_point >= 0x1f130 && code_point <= 0x1f149) ||
        (code_point >= 0x1f150 && code_point <= 0x1f169) ||
        (code_point >= 0x1f170 && code_point <= 0x1f189))
        return true;
    utf8proc_category_t category = utf8proc_category((utf8proc_int32_t)code_point);
    return category == UTF8PROC_CATEGORY_MN || category == UTF8PROC_CATEGORY_MC ||
           category == UTF8PROC_CATEGORY_ME || category == UTF8PROC_CATEGORY_ND ||
           category == UTF8PROC_CATEGORY_NL || category == UTF8PROC_CATEGORY_PC;
}

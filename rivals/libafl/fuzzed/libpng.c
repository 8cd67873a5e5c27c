// The target png: libpng reads a PNG file with the transformations of a viewer. Checksums are
// computed and not compared, as in libpng's own fuzz target, so that inputs reach the decoder.
#include <png.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SIDE = 512 };

struct file {
    const uint8_t *at, *end;
};

static uint8_t *state;

static void take(png_structp png, png_bytep to, png_size_t len) {
    struct file *file = png_get_io_ptr(png);
    if ((size_t)(file->end - file->at) < len) png_error(png, "the file is too short");
    memcpy(to, file->at, len);
    file->at += len;
}

static void ignore(png_structp png, png_const_charp text) {
    (void)png;
    (void)text;
}

// Fills memory of a size in MiB, which a program of that size would hold.
void target_warm(size_t mib) {
    if (mib) memset(state = malloc(mib << 20), 1, mib << 20);
}

void target_run(const uint8_t *input, size_t len) {
    struct file file = {input, input + len};
    png_bytep volatile row = NULL;
    png_structp png = png_create_read_struct(PNG_LIBPNG_VER_STRING, NULL, NULL, ignore);
    png_infop info = png ? png_create_info_struct(png) : NULL;
    if (!info || setjmp(png_jmpbuf(png))) {
        free(row);
        png_destroy_read_struct(&png, &info, NULL);
        return;
    }
    png_set_read_fn(png, &file, take);
    png_set_crc_action(png, PNG_CRC_QUIET_USE, PNG_CRC_QUIET_USE);
    png_set_user_limits(png, SIDE, SIDE);
    png_read_info(png, info);
    png_set_expand(png);
    png_set_gray_to_rgb(png);
    png_set_scale_16(png);
    int passes = png_set_interlace_handling(png);
    png_read_update_info(png, info);
    row = malloc(png_get_rowbytes(png, info));
    for (int pass = 0; row && pass < passes; pass++)
        for (png_uint_32 y = 0; y < png_get_image_height(png, info); y++)
            png_read_row(png, row, NULL);
    png_read_end(png, info);
    free(row);
    png_destroy_read_struct(&png, &info, NULL);
}

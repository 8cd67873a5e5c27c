/* Names those of its arguments that it can open or list. */
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++)
        if (open(argv[i], O_RDONLY) >= 0) puts(argv[i]);
    return 0;
}

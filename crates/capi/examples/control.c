/* Sends requests to the control socket of a pager, and prints the answers: control SOCKET
 * REQUEST... */
#include <stdio.h>

#include "afresh.h"

int main(int argc, char **argv) {
    if (argc < 3) {
        fprintf(stderr, "usage: control SOCKET REQUEST...\n");
        return 2;
    }
    afresh_control *control = NULL;
    if (afresh_control_open(argv[1], &control) != 0) {
        fprintf(stderr, "%s\n", afresh_last_error());
        return 1;
    }
    int code = 0;
    for (int at = 2; at < argc && code != AFRESH_ECONNECTION; at++) {
        char *answer = NULL;
        code = afresh_control_request(control, argv[at], &answer);
        if (code != 0) fprintf(stderr, "%d: %s\n", code, afresh_last_error());
        if (answer) fputs(answer, stdout);
        afresh_text_free(answer);
    }
    afresh_control_close(control);
    return code != 0;
}

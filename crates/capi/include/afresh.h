/* afresh: open a snapshot, restore it lazily at an address, wait, close.
 *
 * Generated from crates/capi/src/lib.rs; a test keeps the two equal.
 */

#ifndef AFRESH_H
#define AFRESH_H

#include <stddef.h>
#include <stdint.h>

/*
 An argument is null, misaligned, or no UTF-8.
 */
#define AFRESH_EINVAL -1

/*
 The store or the snapshot cannot be opened, or is damaged.
 */
#define AFRESH_ESNAPSHOT -2

/*
 The strategy cannot be used here.
 */
#define AFRESH_EUNSUPPORTED -3

/*
 Pages could not be filled; the memory is closed and raises SIGSEGV.
 */
#define AFRESH_EFAILED -4

/*
 Waiting took longer than allowed; the restore continues.
 */
#define AFRESH_ETIMEDOUT -5

/*
 A bug in afresh.
 */
#define AFRESH_EINTERNAL -6

/*
 The pager cannot be reached, or has disconnected.
 */
#define AFRESH_ECONNECTION -7

/*
 The pager has refused the request.
 */
#define AFRESH_EREFUSED -8

/*
 A connection to the control socket of a pager.
 */
typedef struct afresh_control afresh_control;

/*
 A restore under way.
 */
typedef struct afresh_restore afresh_restore;

/*
 An opened snapshot.
 */
typedef struct afresh_snapshot afresh_snapshot;

/*
 How far a restore is.
 */
typedef struct {
  /*
   Faults answered in user space so far.
   */
  uint64_t faults;
  /*
   1 once the memory is complete and nothing of the snapshot is needed any more.
   */
  int32_t done;
} afresh_status;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/*
 The message of the last error in this thread; valid until the next call that fails here. Never
 null.
 */
const char *afresh_last_error(void);

/*
 Opens the snapshot `name` (a tag, or a digest) of the store in directory `store`. Its manifest,
 configuration and index are checked now, its pages when they are used.

 # Safety
 Both strings must end in a zero byte; `out` must be writable. Close the handle with
 `afresh_snapshot_close`.
 */
int32_t afresh_open(const char *store, const char *name, afresh_snapshot **out);

/*
 Length of the snapshot memory in bytes, a multiple of 4096; 0 for a null handle.

 # Safety
 `snapshot` must be null or a live handle.
 */
uint64_t afresh_bytes(const afresh_snapshot *snapshot);

/*
 Copies the guest state, at most `len` bytes of it, to `buffer`, and its whole length to
 `needed`.

 # Safety
 `buffer` must be writable for `len` bytes, or null with `len` 0; `needed` must be writable.
 */
int32_t afresh_state(const afresh_snapshot *snapshot, uint8_t *buffer, size_t len, size_t *needed);

/*
 Starts to restore the snapshot's memory at `address`, whatever is mapped there now. The pages
 come when they are touched and, with most strategies, ahead of that. `strategy` is a name such
 as "stream", or null to let afresh choose.

 # Safety
 `address .. address + afresh_bytes(snapshot)` must be mapped memory of the caller, aligned to
 4096, that is not accessed until this returns and that stays mapped until the restore is closed.
 Only the restore may change its mappings until it is done. `out` must be writable. Close the
 handle with `afresh_restore_close`.
 */
int32_t afresh_map(const afresh_snapshot *snapshot,
                   void *address,
                   const char *strategy,
                   afresh_restore **out);

/*
 Puts the pages that hold `len` bytes at `offset` in place now, so that a system call may touch
 them: one that meets a missing page fails with EFAULT.

 # Safety
 `restore` must be null or a live handle.
 */
int32_t afresh_resolve(const afresh_restore *restore, size_t offset, size_t len);

/*
 Waits until the memory is complete and nothing of the snapshot is mapped or open.

 # Safety
 `restore` must be null or a live handle.
 */
int32_t afresh_wait(const afresh_restore *restore, uint32_t timeout_ms);

/*
 Says how far the restore is.

 # Safety
 `restore` must be null or a live handle; `out` must be writable.
 */
int32_t afresh_status_of(const afresh_restore *restore, afresh_status *out);

/*
 Closes a restore. Before it is done this closes the memory too: touching it raises SIGSEGV. A
 null handle is ignored.

 # Safety
 `restore` must be null or a live handle, which is invalid afterwards.
 */
void afresh_restore_close(afresh_restore *restore);

/*
 Closes a snapshot; restores made from it continue. A null handle is ignored.

 # Safety
 `snapshot` must be null or a live handle, which is invalid afterwards.
 */
void afresh_snapshot_close(afresh_snapshot *snapshot);

/*
 Connects to the control socket of `afresh pager` at `path`.

 # Safety
 `path` must end in a zero byte; `out` must be writable. Close the handle with
 `afresh_control_close`.
 */
int32_t afresh_control_open(const char *path, afresh_control **out);

/*
 Sends `request`, a JSON object, and waits for the answer. `answer` is the text of a JSON object,
 or null where no answer came; free it with `afresh_text_free`. A refused request gives
 `AFRESH_EREFUSED`, and its answer has the `error`. After `AFRESH_ECONNECTION` the connection is
 of no more use.

 # Safety
 `control` must be null or a live handle; `request` must end in a zero byte; `answer` must be
 null or writable.
 */
int32_t afresh_control_request(const afresh_control *control, const char *request, char **answer);

/*
 Frees an answer. Null is ignored.

 # Safety
 `text` must be null or an answer of `afresh_control_request`, which is invalid afterwards.
 */
void afresh_text_free(char *text);

/*
 Closes a connection. A null handle is ignored.

 # Safety
 `control` must be null or a live handle, which is invalid afterwards.
 */
void afresh_control_close(afresh_control *control);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* AFRESH_H */

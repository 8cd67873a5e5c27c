//! Ranges of files: copies within a file, data between holes, and shared memory of `/dev/zero`.

use crate::common::states::assert_answers;

const SCRIPT: &str = r#"
import errno, mmap, os, sys
def ranges():
    def copy(len, start, to):
        try: return os.copy_file_range(file, file, len, start, to)
        except OSError as e: return errno.errorcode[e.errno]
    file = os.open("/tmp/ranges", os.O_RDWR | os.O_CREAT | os.O_TRUNC); os.write(file, bytes(100))
    cut = [copy(4096, 50, 100), copy(4096, 500, 400)]
    os.ftruncate(file, 8 << 20)
    return cut + [copy(4 << 20, 0, 2 << 20), copy(2 << 20, 0, 2 << 20)]
def zeros():
    device = os.open("/dev/zero", os.O_RDWR)
    view = mmap.mmap(device, 8192)
    if (child := os.fork()) == 0: view[4096:4099] = b"new"; os._exit(0)
    os.waitpid(child, 0); read_only = os.open("/dev/zero", os.O_RDONLY)
    try: mmap.mmap(read_only, 4096)
    except OSError as e: refused = errno.errorcode[e.errno]
    return [view[4095:4100], refused, mmap.mmap(read_only, 4096, mmap.MAP_SHARED, mmap.PROT_READ)[:2]]
def holes():
    """Data of a file that is written through a mapping."""
    file = os.memfd_create("holes"); os.ftruncate(file, 64 << 20)
    view = mmap.mmap(file, 64 << 20)
    for page in (3, 4, 9000): view[page * 4096] = 1
    data, at = [], 0
    while True:
        try: start = os.lseek(file, at, os.SEEK_DATA)
        except OSError as e: return data + [errno.errorcode[e.errno]]
        at = os.lseek(file, start, os.SEEK_HOLE); data.append((start // 4096, at // 4096))
for line in sys.stdin:
    print(globals()[line.strip()](), flush=True)
"#;

#[test]
fn copies_within_a_file_are_cut_at_its_end_before_they_overlap() {
    assert_answers(SCRIPT, &[("ranges", "[50, 0, 'EINVAL', 1048576]")]);
}

#[test]
fn a_shared_mapping_of_the_zero_device_is_shared_memory() {
    assert_answers(SCRIPT, &[("zeros", r"[b'\x00new\x00', 'EACCES', b'\x00\x00']")]);
}

#[test]
fn data_that_was_written_through_a_mapping_is_found() {
    assert_answers(SCRIPT, &[("holes", "[(3, 5), (9000, 9001), 'ENXIO']")]);
}

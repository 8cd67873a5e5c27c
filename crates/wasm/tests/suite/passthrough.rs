//! A guest that passes calls on to WASI preview 1, and the calls that tests make of it.

use afresh_wasm::{Lease, Val};

/// The functions that the guest exports as they are, with their parameters.
const FUNCTIONS: [(&str, &str); 24] = [
    ("fd_write", "i32 i32 i32 i32"),
    ("fd_read", "i32 i32 i32 i32"),
    ("fd_seek", "i32 i64 i32 i32"),
    ("fd_close", "i32"),
    ("fd_readdir", "i32 i32 i32 i64 i32"),
    ("fd_renumber", "i32 i32"),
    ("fd_sync", "i32"),
    ("fd_allocate", "i32 i64 i64"),
    ("fd_fdstat_get", "i32 i32"),
    ("fd_fdstat_set_flags", "i32 i32"),
    ("fd_filestat_get", "i32 i32"),
    ("fd_prestat_get", "i32 i32"),
    ("fd_prestat_dir_name", "i32 i32 i32"),
    ("poll_oneoff", "i32 i32 i32 i32"),
    ("path_open", "i32 i32 i32 i32 i32 i64 i64 i32 i32"),
    ("path_unlink_file", "i32 i32 i32"),
    ("path_create_directory", "i32 i32 i32"),
    ("path_remove_directory", "i32 i32 i32"),
    ("path_symlink", "i32 i32 i32 i32 i32"),
    ("path_readlink", "i32 i32 i32 i32 i32 i32"),
    ("path_rename", "i32 i32 i32 i32 i32 i32"),
    ("path_link", "i32 i32 i32 i32 i32 i32 i32"),
    ("path_filestat_get", "i32 i32 i32 i32 i32"),
    ("path_filestat_set_times", "i32 i32 i32 i32 i64 i64 i32"),
];

/// The guest, with a memory of so many pages of 64 KiB and further items of a module.
pub(crate) fn module(pages: usize, items: &str) -> Vec<u8> {
    let (mut imports, mut exports) = (String::new(), String::new());
    for (name, parameters) in FUNCTIONS {
        imports += &format!(
            r#"(import "wasi_snapshot_preview1" "{name}" (func ${name} (param {parameters}) (result i32)))"#
        );
        let gets: String =
            (0..parameters.split(' ').count()).map(|i| format!("(local.get {i})")).collect();
        exports += &format!(
            r#"(func (export "{name}") (param {parameters}) (result i32) (call ${name} {gets}))"#
        );
    }
    let memory = format!(r#"(memory (export "memory") {pages})"#);
    wat::parse_str(format!("(module {imports} {memory} {exports} {items})")).unwrap()
}

/// Calls a function: its error, or 0.
pub(crate) fn ask(lease: &mut Lease<'_>, name: &str, arguments: &[i64]) -> i32 {
    let (_, parameters) = FUNCTIONS.iter().find(|(known, _)| *known == name).unwrap();
    let value = |(parameter, value): (&str, &i64)| match parameter {
        "i64" => Val::I64(*value),
        _ => Val::I32(*value as i32),
    };
    let values: Vec<Val> = parameters.split(' ').zip(arguments).map(value).collect();
    match lease.call(name, &values).unwrap()[..] {
        [Val::I32(answer)] => answer,
        ref other => panic!("{other:?}"),
    }
}

/// The number at an address.
pub(crate) fn number(lease: &mut Lease<'_>, at: usize) -> u32 {
    let mut bytes = [0; 4];
    lease.read_memory(at, &mut bytes).unwrap();
    u32::from_le_bytes(bytes)
}

/// Writes bytes to a descriptor, from this buffer.
pub(crate) fn write(lease: &mut Lease<'_>, fd: i64, buffer: usize, bytes: &[u8]) -> i32 {
    lease.write_memory(buffer, bytes).unwrap();
    lease.write_memory(16, &(buffer as u32).to_le_bytes()).unwrap();
    lease.write_memory(20, &(bytes.len() as u32).to_le_bytes()).unwrap();
    ask(lease, "fd_write", &[fd, 16, 1, 24])
}

/// Reads at most 8 KiB from a descriptor, by way of this buffer.
pub(crate) fn read(lease: &mut Lease<'_>, fd: i64, buffer: usize) -> Vec<u8> {
    lease.write_memory(16, &(buffer as u32).to_le_bytes()).unwrap();
    lease.write_memory(20, &8192_u32.to_le_bytes()).unwrap();
    assert_eq!(ask(lease, "fd_read", &[fd, 16, 1, 24]), 0);
    let mut bytes = vec![0; number(lease, 24) as usize];
    lease.read_memory(buffer, &mut bytes).unwrap();
    bytes
}

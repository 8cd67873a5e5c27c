//! The same for a component, by preview 2.

use super::*;

/// The interfaces of files, as far as the component needs them.
const INTERFACES: &str = r#"
    (import "wasi:filesystem/types@0.2.0" (instance $types
        (export "descriptor" (type $descriptor (sub resource)))
        (export "directory-entry-stream" (type $listing (sub resource)))
        (type $errors (enum "access" "would-block" "already" "bad-descriptor" "busy" "deadlock" "quota" "exist"
            "file-too-large" "illegal-byte-sequence" "in-progress" "interrupted" "invalid" "io" "is-directory" "loop"
            "too-many-links" "message-size" "name-too-long" "no-device" "no-entry" "no-lock" "insufficient-memory"
            "insufficient-space" "not-directory" "not-empty" "not-recoverable" "unsupported" "no-tty"
            "no-such-device" "overflow" "not-permitted" "pipe" "read-only" "invalid-seek" "text-file-busy"
            "cross-device"))
        (export "error-code" (type $error (eq $errors)))
        (type $follow (flags "symlink-follow"))
        (export "path-flags" (type $path-flags (eq $follow)))
        (type $how (flags "create" "directory" "exclusive" "truncate"))
        (export "open-flags" (type $open-flags (eq $how)))
        (type $rights (flags "read" "write" "file-integrity-sync" "data-integrity-sync" "requested-write-sync"
            "mutate-directory"))
        (export "descriptor-flags" (type $descriptor-flags (eq $rights)))
        (export "[method]descriptor.open-at" (func (param "self" (borrow $descriptor)) (param "path-flags" $path-flags)
            (param "path" string) (param "open-flags" $open-flags) (param "flags" $descriptor-flags)
            (result (result (own $descriptor) (error $error)))))
        (export "[method]descriptor.symlink-at" (func (param "self" (borrow $descriptor)) (param "old-path" string)
            (param "new-path" string) (result (result (error $error)))))
        (export "[method]descriptor.rename-at" (func (param "self" (borrow $descriptor)) (param "old-path" string)
            (param "new-descriptor" (borrow $descriptor)) (param "new-path" string) (result (result (error $error)))))
        (export "[method]descriptor.link-at" (func (param "self" (borrow $descriptor))
            (param "old-path-flags" $path-flags) (param "old-path" string)
            (param "new-descriptor" (borrow $descriptor)) (param "new-path" string) (result (result (error $error)))))
        (export "[method]descriptor.unlink-file-at" (func (param "self" (borrow $descriptor)) (param "path" string)
            (result (result (error $error)))))
        (export "[method]descriptor.sync" (func (param "self" (borrow $descriptor)) (result (result (error $error)))))
        (export "[method]descriptor.write" (func (param "self" (borrow $descriptor)) (param "buffer" (list u8))
            (param "offset" u64) (result (result u64 (error $error)))))
        (export "[method]descriptor.read-directory" (func (param "self" (borrow $descriptor))
            (result (result (own $listing) (error $error)))))
        (type $kinds (enum "unknown" "block-device" "character-device" "directory" "fifo" "symbolic-link" "regular-file"
            "socket"))
        (export "descriptor-type" (type $kind (eq $kinds)))
        (type $fields (record (field "type" $kind) (field "name" string)))
        (export "directory-entry" (type $entry (eq $fields)))
        (export "[method]directory-entry-stream.read-directory-entry" (func (param "self" (borrow $listing))
            (result (result (option $entry) (error $error)))))))
    (alias export $types "descriptor" (type $descriptor))
    (import "wasi:filesystem/preopens@0.2.0" (instance $preopens
        (alias outer 1 $descriptor (type $outer))
        (export "descriptor" (type $descriptor (eq $outer)))
        (export "get-directories" (func (result (list (tuple (own $descriptor) string)))))))"#;

/// A component whose functions return 0, or an error and one more. Directories are counted from 0;
/// the number after them is the last file that was opened.
fn component() -> Vec<u8> {
    const LOWERED: [(&str, &str, usize); 8] = [
        ("open", "[method]descriptor.open-at", 7),
        ("symlink", "[method]descriptor.symlink-at", 6),
        ("rename", "[method]descriptor.rename-at", 7),
        ("link", "[method]descriptor.link-at", 8),
        ("unlink", "[method]descriptor.unlink-file-at", 4),
        ("sync", "[method]descriptor.sync", 2),
        ("list", "[method]descriptor.read-directory", 2),
        ("entry", "[method]directory-entry-stream.read-directory-entry", 2),
    ];
    let canon = |function: &str| {
        format!(
            r#"(canon lower (func {function}) (memory (core memory $libc "memory"))
                (realloc (core func $libc "realloc")))"#
        )
    };
    let (mut lowered, mut imports, mut given) = (String::new(), String::new(), String::new());
    for (name, method, parameters) in LOWERED {
        lowered += &format!("(core func ${name} {})", canon(&format!("$types \"{method}\"")));
        let parameters = "i32 ".repeat(parameters);
        imports += &format!(r#"(import "host" "{name}" (func ${name} (param {parameters})))"#);
        given += &format!(r#"(export "{name}" (func ${name}))"#);
    }
    let directories = canon("$preopens \"get-directories\"");
    let write = canon("$types \"[method]descriptor.write\"");
    wat::parse_str(format!(
        r#"(component {INTERFACES}
        (core module $libc
            (memory (export "memory") 16)
            (global $free (mut i32) (i32.const 65536))
            (func (export "realloc") (param i32 i32 i32 i32) (result i32)
                (global.get $free)
                (global.set $free (i32.and (i32.const -8) (i32.add (i32.const 7)
                    (i32.add (global.get $free) (local.get 3)))))))
        (core instance $libc (instantiate $libc))
        (core func $directories {directories})
        (core func $write {write})
        {lowered}
        (core module $code
            (import "libc" "memory" (memory 1))
            (import "host" "directories" (func $directories (param i32)))
            (import "host" "write" (func $write (param i32 i32 i32 i64 i32)))
            {imports}
            (global $count (mut i32) (i32.const -1))
            (global $last (mut i32) (i32.const -1))
            ;; The handle of a directory by its number.
            (func $handle (param $at i32) (result i32)
                (if (i32.eq (global.get $count) (i32.const -1)) (then
                    (call $directories (i32.const 16))
                    (global.set $count (i32.load (i32.const 20)))))
                (if (result i32) (i32.eq (local.get $at) (global.get $count))
                    (then (global.get $last))
                    (else (i32.load (i32.add (i32.load (i32.const 16)) (i32.mul (local.get $at) (i32.const 12)))))))
            ;; The answer of a function without a value.
            (func $answer (result i32)
                (if (result i32) (i32.load8_u (i32.const 32))
                    (then (i32.add (i32.const 1) (i32.load8_u (i32.const 33))))
                    (else (i32.const 0))))
            ;; That of one with a value.
            (func $valued (param $at i32) (result i32)
                (if (result i32) (i32.load8_u (i32.const 32))
                    (then (i32.add (i32.const 1) (i32.load8_u (i32.add (i32.const 32) (local.get $at)))))
                    (else (i32.const 0))))
            (func (export "open") (param $d i32) (param $path i32) (param $len i32) (param $pf i32) (param $of i32)
                (param $flags i32) (result i32)
                (call $open (call $handle (local.get $d)) (local.get $pf) (local.get $path) (local.get $len)
                    (local.get $of) (local.get $flags) (i32.const 32))
                (if (i32.eqz (i32.load8_u (i32.const 32))) (then (global.set $last (i32.load (i32.const 36)))))
                (call $valued (i32.const 4)))
            (func (export "symlink") (param $d i32) (param i32 i32 i32 i32) (result i32)
                (call $symlink (call $handle (local.get $d)) (local.get 1) (local.get 2) (local.get 3) (local.get 4)
                    (i32.const 32))
                (call $answer))
            (func (export "rename") (param $d i32) (param i32 i32) (param $to i32) (param i32 i32) (result i32)
                (call $rename (call $handle (local.get $d)) (local.get 1) (local.get 2) (call $handle (local.get $to))
                    (local.get 4) (local.get 5) (i32.const 32))
                (call $answer))
            (func (export "link") (param $d i32) (param i32 i32) (param $to i32) (param i32 i32) (result i32)
                (call $link (call $handle (local.get $d)) (i32.const 0) (local.get 1) (local.get 2)
                    (call $handle (local.get $to)) (local.get 4) (local.get 5) (i32.const 32))
                (call $answer))
            (func (export "unlink") (param $d i32) (param i32 i32) (result i32)
                (call $unlink (call $handle (local.get $d)) (local.get 1) (local.get 2) (i32.const 32))
                (call $answer))
            (func (export "sync") (param $d i32) (result i32)
                (call $sync (call $handle (local.get $d)) (i32.const 32))
                (call $answer))
            (func (export "write") (param i32 i32) (result i32)
                (call $write (global.get $last) (local.get 0) (local.get 1) (i64.const 0) (i32.const 32))
                (call $valued (i32.const 8)))
            ;; The number of entries.
            (func (export "list") (param $d i32) (result i32) (local $count i32) (local $listing i32)
                (call $list (call $handle (local.get $d)) (i32.const 32))
                (if (i32.load8_u (i32.const 32)) (then (return (i32.const -1))))
                (local.set $listing (i32.load (i32.const 36)))
                (loop $more
                    (call $entry (local.get $listing) (i32.const 32))
                    (if (i32.load8_u (i32.const 32)) (then (return (i32.const -2))))
                    (if (i32.load8_u (i32.const 36)) (then
                        (local.set $count (i32.add (local.get $count) (i32.const 1)))
                        (br $more))))
                (local.get $count)))
        (core instance $code (instantiate $code
            (with "libc" (instance $libc))
            (with "host" (instance (export "directories" (func $directories)) (export "write" (func $write)) {given}))))
        (func (export "open") (param "d" u32) (param "path" string) (param "pf" u32) (param "of" u32) (param "flags" u32)
            (result u32) (canon lift (core func $code "open") (memory (core memory $libc "memory"))
                (realloc (core func $libc "realloc"))))
        (func (export "symlink") (param "d" u32) (param "old" string) (param "new" string)
            (result u32) (canon lift (core func $code "symlink") (memory (core memory $libc "memory"))
                (realloc (core func $libc "realloc"))))
        (func (export "rename") (param "d" u32) (param "old" string) (param "to" u32) (param "new" string)
            (result u32) (canon lift (core func $code "rename") (memory (core memory $libc "memory"))
                (realloc (core func $libc "realloc"))))
        (func (export "link") (param "d" u32) (param "old" string) (param "to" u32) (param "new" string)
            (result u32) (canon lift (core func $code "link") (memory (core memory $libc "memory"))
                (realloc (core func $libc "realloc"))))
        (func (export "unlink") (param "d" u32) (param "path" string)
            (result u32) (canon lift (core func $code "unlink") (memory (core memory $libc "memory"))
                (realloc (core func $libc "realloc"))))
        (func (export "write") (param "bytes" string)
            (result u32) (canon lift (core func $code "write") (memory (core memory $libc "memory"))
                (realloc (core func $libc "realloc"))))
        (func (export "sync") (param "d" u32) (result u32) (canon lift (core func $code "sync")))
        (func (export "list") (param "d" u32) (result u32) (canon lift (core func $code "list"))))"#
    ))
    .unwrap()
}

/// Errors of preview 2.
const IS_DIRECTORY: u32 = 14;
const NAME_TOO_LONG: u32 = 18;
const NO_ENTRY: u32 = 20;
const NOT_DIRECTORY: u32 = 24;
const NOT_PERMITTED: u32 = 31;
const INSUFFICIENT_MEMORY: u32 = 22;

/// Flags of `open-at`, and of a descriptor.
const MAKE: u32 = 1;
const ONLY_DIRECTORY: u32 = 2;
const CUT: u32 = 8;
const READ: u32 = 1;
const WRITE: u32 = 2;

pub(super) fn warm_component(options: GuestOptions) -> WarmComponent {
    Guest::with_options(&engine(), &component(), options).unwrap().warm_component().unwrap()
}

/// Calls a function of the component; returns its error.
fn answer(
    lease: &mut ComponentLease<'_>,
    name: &str,
    arguments: &[ComponentVal],
) -> Result<(), u32> {
    match lease.call(name, arguments).unwrap()[..] {
        [ComponentVal::U32(0)] => Ok(()),
        [ComponentVal::U32(error)] => Err(error - 1),
        ref other => panic!("{name}: {other:?}"),
    }
}

fn open_at(
    lease: &mut ComponentLease<'_>,
    directory: u32,
    path: &str,
    how: u32,
    flags: u32,
) -> Result<(), u32> {
    let numbers = [1, how, flags].map(ComponentVal::U32);
    let mut arguments = vec![ComponentVal::U32(directory), ComponentVal::String(path.into())];
    arguments.extend(numbers);
    answer(lease, "open", &arguments)
}

fn two_paths(
    lease: &mut ComponentLease<'_>,
    name: &str,
    (from, old): (u32, &str),
    (into, new): (u32, &str),
) -> Result<(), u32> {
    let arguments = [
        ComponentVal::U32(from),
        ComponentVal::String(old.into()),
        ComponentVal::U32(into),
        ComponentVal::String(new.into()),
    ];
    answer(lease, name, &arguments)
}

fn unlink(lease: &mut ComponentLease<'_>, directory: u32, path: &str) -> Result<(), u32> {
    answer(lease, "unlink", &[ComponentVal::U32(directory), ComponentVal::String(path.into())])
}

fn symlink_at(lease: &mut ComponentLease<'_>, target: &str, path: &str) -> Result<(), u32> {
    let paths = [target, path].map(|path| ComponentVal::String(path.into()));
    let [target, path] = paths;
    answer(lease, "symlink", &[ComponentVal::U32(0), target, path])
}

#[test]
fn nothing_leads_a_component_out_and_its_writes_stay() {
    let place = GrantedDirs::new();
    fs::write(place.path("two/given"), b"given").unwrap();
    fs::create_dir(place.path("one/d")).unwrap();
    symlink(place.path("out"), place.path("one/absolute")).unwrap();
    let made = std::process::Command::new("mkfifo").arg(place.path("one/pipe")).status().unwrap();
    assert!(made.success());
    let warm = warm_component(place.options(false));
    let mut lease = warm.lease().unwrap();
    open_at(&mut lease, 0, "mine", MAKE, READ | WRITE).unwrap();
    answer(&mut lease, "write", &[ComponentVal::String("kept".into())]).unwrap();
    answer(&mut lease, "sync", &[ComponentVal::U32(2)]).unwrap();
    answer(&mut lease, "sync", &[ComponentVal::U32(0)]).unwrap();
    symlink_at(&mut lease, "../out/secret", "secret").unwrap();
    symlink_at(&mut lease, "../out/new", "dangling").unwrap();
    symlink_at(&mut lease, "..", "d/up").unwrap();
    assert_eq!(symlink_at(&mut lease, "/etc", "etc"), Err(NOT_PERMITTED));
    let out = place.path("out/secret");
    // The directory `d` is number 2 from here on.
    open_at(&mut lease, 0, "d", ONLY_DIRECTORY, READ).unwrap();
    let paths = [
        (2, ".."),
        (2, "../mine"),
        (2, "up/mine"),
        (0, "../out/secret"),
        (0, "secret"),
        (0, "secret/"),
        (0, "dangling"),
        (0, "absolute/secret"),
        (0, "d/up/../out/secret"),
        (0, "../two/given"),
        (0, out.to_str().unwrap()),
        (0, "pipe"),
        (1, "../out/secret"),
    ];
    for (directory, path) in paths {
        for (how, flags) in [(0, READ), (MAKE, READ | WRITE), (MAKE | CUT, WRITE), (CUT, WRITE)] {
            let refused = open_at(&mut lease, directory, path, how, flags).unwrap_err();
            assert!([NOT_PERMITTED, NOT_DIRECTORY].contains(&refused), "{path}: {refused}");
        }
        let _ = two_paths(&mut lease, "link", (directory, path), (0, "hard"));
        place.check();
    }
    for path in ["x".repeat(256), "x/".repeat(2049)] {
        assert_eq!(open_at(&mut lease, 0, &path, MAKE, WRITE), Err(NAME_TOO_LONG));
    }
    for (path, error) in [("", NO_ENTRY), ("/", NOT_PERMITTED), ("new/", IS_DIRECTORY)] {
        assert_eq!(open_at(&mut lease, 0, path, MAKE, WRITE), Err(error), "{path:?}");
    }
    for (how, flags) in [(0, WRITE), (MAKE, READ), (CUT, READ)] {
        assert_eq!(open_at(&mut lease, 1, "given", how, flags), Err(NOT_PERMITTED));
    }
    for name in ["rename", "link"] {
        let moved = two_paths(&mut lease, name, (1, "given"), (0, "taken"));
        assert_eq!(moved, Err(NOT_PERMITTED), "{name}");
    }
    for (directory, path) in paths {
        let _ = two_paths(&mut lease, "rename", (0, "mine"), (directory, path));
        let _ = two_paths(&mut lease, "rename", (directory, path), (0, "mine"));
        let _ = unlink(&mut lease, directory, path);
        place.check();
    }
    open_at(&mut lease, 1, "given", 0, READ).unwrap();
    drop(lease);
    assert_eq!(fs::read(place.path("two/given")).unwrap(), b"given");
    // A later lease finds what the first has left.
    let mut lease = warm.lease().unwrap();
    open_at(&mut lease, 0, "again", MAKE, WRITE).unwrap();
    assert!(place.path("one/again").is_file());
}

#[test]
fn a_component_lists_a_large_directory_and_has_so_many_handles() {
    let place = GrantedDirs::new();
    for number in 0..2000 {
        fs::write(place.path(&format!("one/file-{number}")), b"").unwrap();
    }
    let warm = warm_component(place.options(true));
    for _ in 0..2 {
        let mut lease = warm.lease().unwrap();
        let listed = lease.call("list", &[ComponentVal::U32(0)]).unwrap();
        assert!(matches!(listed[..], [ComponentVal::U32(2000)]), "{listed:?}");
        let opened = (0..1000).find_map(|_| open_at(&mut lease, 0, "file-0", 0, READ).err());
        assert_eq!(opened, Some(INSUFFICIENT_MEMORY));
    }
}

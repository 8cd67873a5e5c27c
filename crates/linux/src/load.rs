//! Loads an ELF program and its dynamic loader into an empty guest, as Linux's `execve` does.

use std::ffi::OsStr;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use afresh_files::{Kind, Node, Tree, Walk};
use rustix::io::Errno;

use crate::elf::Elf;
use crate::error::WarmError;
use crate::exec_command::ExecCommand;
use crate::file_cache::FileCache;
use crate::guest::{Guest, StopReason, after};
use crate::platform::{Continuation, features};
use crate::sentry::PLATFORM;
use crate::sentry::{
    ArgumentStrings, Change, Content, Executable, FileBacking, FilePart, Kernel, MAX_WHOLE, PAGE,
    path_of_name,
};

/// Address of programs that can be at any address.
const BASE: u64 = 0x5555_5555_4000;
/// Where their loaders go.
const LOADER_BASE: u64 = 0x6fff_f000_0000;
/// Longest file that is loaded as a program.
const MAX_PROGRAM_SIZE: u64 = 1 << 30;
/// Maximum bytes at the beginning of a file that describe its loading.
const HEAD: u64 = 64 << 10;
/// Bytes of arguments and environment.
const STRINGS: usize = (crate::sentry::STACK_LEN / 4) as usize;
/// Maximum depth of interpreters that are scripts, and the program at the end.
const SCRIPTS: usize = 5;

/// The interpreter line of a script, without the marker.
fn interpreter(line: &[u8]) -> String {
    let line = line.split(|&byte| byte == b'\n').next().unwrap_or_default();
    let line = String::from_utf8_lossy(&line[..line.len().min(200)]).trim().to_owned();
    match line.strip_prefix("/usr/bin/env ") {
        Some(rest) => rest.trim().to_owned(),
        None => line,
    }
}

/// Whether a script stands for another program, which a version manager chooses.
fn is_shim(path: &Path) -> bool {
    path.parent().and_then(Path::file_name).is_some_and(|parent| parent == "shims")
}

/// The way out for a script that cannot be run.
fn way_past(path: &Path) -> String {
    if is_shim(path) {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        return format!(
            "it stands for a program that a version manager chooses: give that program's own path (`pyenv \
             which {name}`, `asdf which {name}` or the like prints it)"
        );
    }
    "its interpreter cannot run it: grant the interpreter as well, and make the script executable; or name the interpreter, and the script as its argument"
        .to_owned()
}

/// The beginning of a file of the guest, and its length.
fn read_head(tree: &Tree, node: Node, path: &[u8]) -> Result<(Vec<u8>, u64), WarmError> {
    let path = || PathBuf::from(OsStr::from_bytes(path));
    let stat = tree.stat(node).map_err(|_| WarmError::NotFound(path()))?;
    let why = "it is not a file of at most 1 GiB";
    let unloadable = || WarmError::Unloadable { path: path(), why };
    if stat.kind != Kind::File || stat.size > MAX_PROGRAM_SIZE {
        return Err(unloadable());
    }
    let head = |len| read_part(tree, node, 0..stat.size.min(len)).ok_or_else(unloadable);
    let short = head(PAGE)?;
    // The headers of most programs are in their first page.
    match Elf::parse(&short, stat.size) {
        Ok(_) => Ok((short, stat.size)),
        Err(_) => Ok((head(HEAD)?, stat.size)),
    }
}

/// Bytes of a file, which it has.
fn read_part(tree: &Tree, node: Node, range: Range<u64>) -> Option<Vec<u8>> {
    let mut bytes = vec![0; (range.end - range.start) as usize];
    let read = tree.read(node, range.start, &mut bytes).ok()?;
    (read == bytes.len()).then_some(bytes)
}

/// A file and its parts.
#[derive(Debug)]
struct Object {
    path: PathBuf,
    elf: Elf,
    node: Node,
}

impl Object {
    fn new(path: &[u8], node: Node, head: &[u8], size: u64) -> Result<Self, WarmError> {
        let path = PathBuf::from(OsStr::from_bytes(path));
        match Elf::parse(head, size) {
            Ok(elf) => Ok(Self { path, elf, node }),
            Err(why) => Err(WarmError::Unloadable { path, why }),
        }
    }

    /// The file at a path from a root directory of the guest.
    fn find(tree: &Tree, root: Node, path: &[u8]) -> Result<Self, WarmError> {
        let missing = |_| WarmError::NotFound(PathBuf::from(OsStr::from_bytes(path)));
        let place = tree.walk(path, Walk::new(root).root(root)).map_err(missing)?;
        let node = place.node().map_err(missing)?;
        let (head, size) = read_head(tree, node, path)?;
        Self::new(path, node, &head, size)
    }
}

/// A program that is ready to be loaded.
#[derive(Debug)]
pub(crate) struct Loadable {
    /// Its path, as it was named.
    path: Vec<u8>,
    /// The same without links.
    real: Vec<u8>,
    /// The last part of the given name, which may have been a script.
    name: Vec<u8>,
    program: Object,
    loader: Option<Object>,
    args: Vec<Vec<u8>>,
    env: Vec<Vec<u8>>,
}

impl Loadable {
    fn new(
        (tree, root): (&Tree, Node),
        named: &[u8],
        real: Vec<u8>,
        program: Object,
        strings: (Vec<Vec<u8>>, Vec<Vec<u8>>),
    ) -> Result<Self, WarmError> {
        let path = program.path.as_os_str().as_bytes().to_vec();
        let name = program.elf.loader.as_deref().map(|name| name.as_os_str().as_bytes());
        let loader = name.map(|name| Object::find(tree, root, name)).transpose()?;
        let (args, env) = strings;
        let name = named.rsplit(|&byte| byte == b'/').next().unwrap_or_default().to_vec();
        Ok(Self { path, real, name, program, loader, args, env })
    }

    /// The identity of a process that runs it.
    pub(crate) fn identity(&self) -> Executable {
        let strings = ArgumentStrings::new(&self.args, &self.env);
        Executable { program: self.real.clone(), name: self.name.clone(), strings }
    }
}

impl ExecCommand {
    /// Finds the program, which the current process must be permitted to run: the interpreter for a
    /// script.
    pub(crate) fn find(self, state: &Kernel) -> Result<Loadable, Errno> {
        let Self { mut path, from, mut args, env } = self;
        let (named, tree, from_root) = (path.clone(), &state.tree, (&state.tree, state.root()));
        if args.is_empty() {
            args.push(Vec::new());
        }
        for _ in 0..SCRIPTS {
            let place = tree.walk(&path, state.searching(Walk::new(from)))?;
            let node = place.node()?;
            let stat = tree.stat(node)?;
            if stat.kind != Kind::File || !state.may_run(&stat) {
                return Err(Errno::ACCESS);
            }
            let (head, size) = read_head(tree, node, &path).map_err(|_| Errno::NOEXEC)?;
            let Some(line) = head.strip_prefix(b"#!") else {
                let real = path_of_name(tree, place.directory, &place.name)?;
                let program = Object::new(&path, node, &head, size);
                let loadable = program.and_then(|program| {
                    Loadable::new(from_root, &named, real, program, (args, env))
                });
                return loadable.map_err(|error| match error {
                    WarmError::NotFound(_) => Errno::NOENT,
                    _ => Errno::NOEXEC,
                });
            };
            // The interpreter, at most one argument of it, and the script.
            let line = line.split(|&byte| byte == b'\n').next().unwrap_or_default().trim_ascii();
            let end = line.iter().position(u8::is_ascii_whitespace).unwrap_or(line.len());
            let (interpreter, argument) = (line[..end].to_vec(), line[end..].trim_ascii().to_vec());
            if interpreter.is_empty() {
                return Err(Errno::NOEXEC);
            }
            let script = std::mem::replace(&mut path, interpreter.clone());
            let argument = Some(argument).filter(|argument| !argument.is_empty());
            args.splice(..1, [Some(interpreter), argument, Some(script)].into_iter().flatten());
        }
        Err(Errno::LOOP)
    }
}

/// Plans the mappings of one file, and returns the offset of its addresses.
fn map(
    guest: &mut Guest,
    object: &Object,
    base: u64,
    changes: &mut Vec<Change>,
) -> Result<u64, WarmError> {
    let Object { path, elf, node } = object;
    let slide = if elf.anywhere { base } else { 0 };
    // Before anything is read: a file may be sparse, and its segments large.
    let total = elf.parts.iter().fold(0u64, |sum, part| sum.saturating_add(part.memory_len));
    if total > guest.sentry.state.layout.limit() {
        return Err(WarmError::TooLarge);
    }
    for part in &elf.parts {
        let address = part.address.checked_add(slide).ok_or(WarmError::TooLarge)?;
        let before = address % PAGE;
        let bytes = part.offset - before..part.offset + part.file_len;
        let len = part.memory_len + before;
        let protection = [(4, libc::PROT_READ), (2, libc::PROT_WRITE), (1, libc::PROT_EXEC)]
            .into_iter()
            .filter(|(flag, _)| part.flags & flag != 0)
            .fold(0, |all, (_, bit)| all | bit as u64);
        let (contents, state) = (&mut guest.sentry.contents, &mut guest.sentry.state);
        let most = state.layout.limit() / FileCache::SHARE;
        // Parts that are written soon, or are longer than the file, are copied.
        let shows = part.flags & 2 == 0 && part.memory_len == part.file_len;
        let shown =
            shows.then(|| contents.show(&state.tree, *node, (bytes.start, len, protection), most));
        let content = match shown {
            Some(Ok(Some((shown, len)))) => Content::Shown(shown, len, protection),
            _ if part.file_len > MAX_WHOLE => {
                let part = FilePart::new(&state.tree, *node, bytes);
                Content::Copied(part.map_err(|_| WarmError::NotFound(path.clone()))?)
            }
            _ => {
                let bytes = read_part(&state.tree, *node, bytes);
                Content::Bytes(bytes.ok_or_else(|| WarmError::NotFound(path.clone()))?)
            }
        };
        let layout = &mut std::sync::Arc::make_mut(state).layout;
        let (start, change) = layout
            .map(Some(address - before), false, len, protection, Some(content))
            .map_err(|_| WarmError::TooLarge)?;
        // The rest has no bytes in the file.
        let end = (start + before + part.file_len).next_multiple_of(PAGE);
        layout.originate(start..end, FileBacking::new(*node, start, part.offset - before));
        changes.push(change);
    }
    Ok(slide)
}

/// Loads `path` with its arguments and environment; the guest then runs.
pub(crate) fn load(
    guest: &mut Guest,
    path: &Path,
    args: Vec<Vec<u8>>,
    env: Vec<Vec<u8>>,
) -> Result<(), WarmError> {
    let tree = &guest.sentry.state.tree;
    let name = path.as_os_str().as_bytes();
    let missing = |_| WarmError::NotFound(path.to_path_buf());
    let found = tree.walk(name, Walk::new(Tree::ROOT)).map_err(missing)?;
    let node = found.node().map_err(missing)?;
    let (head, size) = read_head(tree, node, name)?;
    let loadable = if let Some(line) = head.strip_prefix(b"#!") {
        let command = ExecCommand { path: name.to_vec(), from: Tree::ROOT, args, env };
        let found =
            if is_shim(path) { Err(Errno::NOEXEC) } else { command.find(&guest.sentry.state) };
        found.map_err(|_| WarmError::Script {
            path: path.to_path_buf(),
            interpreter: interpreter(line),
            help: way_past(path),
        })?
    } else {
        let program = Object::new(name, node, &head, size)?;
        let real = path_of_name(tree, found.directory, &found.name);
        let real = real.map_err(|_| WarmError::NotFound(path.to_path_buf()))?;
        Loadable::new((tree, Tree::ROOT), name, real, program, (args, env))?
    };
    guest.sentry.change().set_program(loadable.identity());
    // Limits hold from the program's first instruction on.
    place(guest, &loadable, after(Duration::MAX)).map(drop)
}

/// Loads a program into an empty process, which then runs. Returns why the call ends, if it does
/// meanwhile.
pub(crate) fn place(
    guest: &mut Guest,
    loadable: &Loadable,
    deadline: Instant,
) -> Result<Option<StopReason>, WarmError> {
    let Loadable { path, program, loader, args, env, .. } = loadable;
    let mut changes = Vec::new();
    let slide = map(guest, program, BASE, &mut changes)?;
    let elf = &program.elf;
    let (loader, entry) = match loader {
        Some(loader) => {
            let slide = map(guest, loader, LOADER_BASE, &mut changes)?;
            (slide, loader.elf.entry.wrapping_add(slide))
        }
        None => (0, elf.entry.wrapping_add(slide)),
    };
    let end = elf.parts.last().map_or(0, |p| slide + p.address + p.memory_len);
    let state = std::sync::Arc::make_mut(&mut guest.sentry.state);
    // A page between, so that running over the end of the data is noticed.
    state.layout.start_heap(end.next_multiple_of(PAGE) + PAGE);
    let (stack, change) = state.layout.map_stack().map_err(|_| WarmError::TooLarge)?;
    changes.push(change);
    let halt = guest.enact_all_until_halt(changes, deadline)?;
    if halt.is_some() {
        return Ok(halt);
    }

    // Strings at the top, then random bytes, then the table of pointers, which ends on 16 bytes.
    let mut strings = Vec::new();
    let mut offsets = Vec::new();
    for string in args.iter().chain(env).chain([path]) {
        offsets.push(strings.len() as u64);
        strings.extend(string);
        strings.push(0);
    }
    let mut random = [0; 16];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
        .map_err(|error| crate::platform::PlatformError::kernel("getrandom", error))?;
    let random_at = strings.len() as u64;
    strings.extend(random);
    let platform_at = strings.len() as u64;
    strings.extend(PLATFORM.as_bytes());
    strings.push(0);
    if strings.len() > STRINGS {
        return Err(WarmError::TooLarge);
    }
    let strings_at = (stack.end - strings.len() as u64) & !15;
    let at = |offset: u64| strings_at + offset;
    let mut words = vec![args.len() as u64];
    words.extend(offsets[..args.len()].iter().map(|&o| at(o)));
    words.push(0);
    words.extend(offsets[args.len()..offsets.len() - 1].iter().map(|&o| at(o)));
    words.push(0);
    let ids = guest.sentry.state.real_and_effective().map(|both| both.map(u64::from));
    let [[user, effective_user], [group, effective_group]] = ids;
    let before = words.len();
    if let Some(clock) = guest.body.process.clock() {
        words.extend([libc::AT_SYSINFO_EHDR, clock]);
    }
    if let Some(features) = features() {
        words.extend([libc::AT_HWCAP, features]);
    }
    for (kind, value) in [
        (libc::AT_PHDR, elf.headers_at.wrapping_add(slide)),
        (libc::AT_PHENT, 56),
        (libc::AT_PHNUM, elf.headers),
        (libc::AT_PAGESZ, PAGE),
        (libc::AT_BASE, loader),
        (libc::AT_FLAGS, 0),
        (libc::AT_ENTRY, elf.entry.wrapping_add(slide)),
        (libc::AT_UID, user),
        (libc::AT_EUID, effective_user),
        (libc::AT_GID, group),
        (libc::AT_EGID, effective_group),
        (libc::AT_SECURE, 0),
        (libc::AT_CLKTCK, 100),
        (libc::AT_RANDOM, at(random_at)),
        (libc::AT_PLATFORM, at(platform_at)),
        (libc::AT_EXECFN, at(offsets[offsets.len() - 1])),
        (libc::AT_NULL, 0),
    ] {
        words.extend([kind, value]);
    }
    let vector: Vec<u8> = words[before..].iter().flat_map(|word| word.to_le_bytes()).collect();
    std::sync::Arc::make_mut(&mut guest.sentry.state).set_auxiliary_vector(&vector);
    let table_at = (strings_at - 8 * words.len() as u64) & !15;
    let table: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let written = guest.body.process.write(strings_at, &strings)?
        && guest.body.process.write(table_at, &table)?;
    if !written {
        return Err(WarmError::TooLarge);
    }
    guest.body.process.set_start(entry, table_at);
    if guest.sentry.is_traced() {
        guest.go_on_traced()?;
    } else {
        let commands = crate::platform::StubCommands::default();
        guest.body.process.execute(&commands, Continuation::Resume)?;
    }
    guest.body.process.forget_frame();
    Ok(None)
}

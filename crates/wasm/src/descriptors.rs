//! WASI descriptors that a warm-up leaves behind.
//!
//! Every call finds the descriptors that it is given: standard input, output and error, and the directories. A guest
//! whose files are a tree in memory keeps its open descriptors ([`crate::files`]). A guest with host directories does
//! not: if its warm-up opened another descriptor or closed one of these, a call would continue with a number that
//! means another file, or none. So the descriptors after the warm-up are compared with those of a call, and any
//! difference is refused.
//!
//! wasmtime-wasi does not show its table, but a guest can query every descriptor, and a small module that does just
//! that borrows the table.
//!
//! Promises: after a check that passed, every number that was open still is, is the same kind of thing with the same
//! name and flags, and no other is open. May break it: an embedder that replaces WASI functions by its own
//! (`Imports`) keeps descriptors that this check does not see.

use std::collections::BTreeSet;

use wasm_encoder::{
    CodeSection, EntityType, ExportKind, ExportSection, Function, FunctionSection, ImportSection,
    MemorySection, MemoryType, Module, TypeSection, ValType,
};
use wasmtime::{Instance, Linker, Memory, Store, TypedFunc};

use crate::WarmError;
use crate::call_path::CallPath;
use crate::host::Host;
use crate::stores::Stores;

const WASI: &str = "wasi_snapshot_preview1";
/// Standard input, output and error come before the directories.
const STANDARD: u32 = 3;
/// The address of a name; the queried data is below it.
const NAME: u32 = 64;
/// Errno: no such descriptor.
const BADF: i32 = 8;
/// Open flag: a directory.
const DIRECTORY: i32 = 2;

/// The functions that are called, with the number and type of their parameters.
const FUNCTIONS: [(&str, &[ValType]); 5] = {
    use ValType::{I32, I64};
    [
        ("fd_fdstat_get", &[I32, I32]),
        ("fd_prestat_get", &[I32, I32]),
        ("fd_prestat_dir_name", &[I32, I32, I32]),
        ("fd_close", &[I32]),
        ("path_open", &[I32, I32, I32, I32, I32, I64, I64, I32, I32]),
    ]
};

/// A module with a memory and a function that calls each of them.
fn module() -> Vec<u8> {
    let (mut types, mut imports, mut functions) =
        (TypeSection::new(), ImportSection::new(), FunctionSection::new());
    let (mut exports, mut code) = (ExportSection::new(), CodeSection::new());
    let count = FUNCTIONS.len() as u32;
    for (index, (name, parameters)) in (0..).zip(FUNCTIONS) {
        types.ty().function(parameters.iter().copied(), [ValType::I32]);
        imports.import(WASI, name, EntityType::Function(index));
        functions.function(index);
        let mut body = Function::new([]);
        let mut sink = body.instructions();
        for parameter in 0..parameters.len() as u32 {
            sink.local_get(parameter);
        }
        sink.call(index).end();
        code.function(&body);
        exports.export(name, ExportKind::Func, count + index);
    }
    exports.export("memory", ExportKind::Memory, 0);
    let mut memories = MemorySection::new();
    memories.memory(MemoryType {
        minimum: 1,
        maximum: Some(1),
        memory64: false,
        shared: false,
        page_size_log2: None,
    });
    let mut module = Module::new();
    module.section(&types).section(&imports).section(&functions).section(&memories);
    module.section(&exports).section(&code);
    module.finish()
}

/// Asks about the descriptors of its store.
struct Asker {
    store: Store<Host>,
    instance: Instance,
    memory: Memory,
}

/// The known state of a descriptor: its status, and the name of a preopened directory.
type DescriptorState = Option<(Vec<u8>, Option<Vec<u8>>)>;

impl Asker {
    fn new(mut store: Store<Host>) -> wasmtime::Result<Self> {
        let mut linker = Linker::new(store.engine());
        wasmtime_wasi::p1::add_to_linker_sync(&mut linker, Host::p1)?;
        let module = wasmtime::Module::new(store.engine(), module())?;
        let instance = linker.instantiate(&mut store, &module)?;
        let memory = instance
            .get_memory(&mut store, "memory")
            .ok_or_else(|| wasmtime::Error::msg("the asking module has no memory"))?;
        Ok(Self { store, instance, memory })
    }

    fn ask<P: wasmtime::WasmParams>(&mut self, name: &str, params: P) -> wasmtime::Result<i32> {
        let function: TypedFunc<P, i32> = self.instance.get_typed_func(&mut self.store, name)?;
        function.call(&mut self.store, params)
    }

    fn answer(&mut self, at: u32, len: usize) -> wasmtime::Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.memory.read(&self.store, at as usize, &mut bytes)?;
        Ok(bytes)
    }

    fn is_open(&mut self, fd: u32) -> wasmtime::Result<bool> {
        Ok(self.ask("fd_fdstat_get", (fd as i32, 0))? != BADF)
    }

    fn see(&mut self, fd: u32) -> wasmtime::Result<DescriptorState> {
        let number = fd as i32;
        // The padding between the fields of an answer is not written.
        self.memory.write(&mut self.store, 0, &[0; NAME as usize])?;
        if !self.is_open(fd)? {
            return Ok(None);
        }
        let status = self.answer(0, 24)?;
        if self.ask("fd_prestat_get", (number, 0))? != 0 {
            return Ok(Some((status, None)));
        }
        let prestat = self.answer(0, 8)?;
        let length = u32::from_le_bytes([prestat[4], prestat[5], prestat[6], prestat[7]]);
        let mut name = Vec::new();
        let room = self.memory.data_size(&self.store) - NAME as usize;
        if length as usize <= room
            && self.ask("fd_prestat_dir_name", (number, NAME as i32, length as i32))? == 0
        {
            name = self.answer(NAME, length as usize)?;
        }
        Ok(Some((status, Some(name))))
    }

    /// Descriptors that are open in addition to the first `given`. Numbers are given out densely: the next one is the
    /// largest that has become free, or one more than the largest there is. So all numbers above that of one more
    /// descriptor, opened in directory `directory`, are in use up to the last.
    fn beyond(&mut self, given: u32, directory: u32) -> wasmtime::Result<BTreeSet<u32>> {
        self.memory.write(&mut self.store, NAME as usize, b".")?;
        let (at, length) = (NAME as i32, 1);
        let fd = directory as i32;
        let status = self.ask("path_open", (fd, 0, at, length, DIRECTORY, 0_i64, 0_i64, 0, 0))?;
        if status != 0 {
            return Err(wasmtime::Error::msg(format!(
                "the directory of descriptor {directory} cannot be opened (WASI error {status})"
            )));
        }
        let bytes = self.answer(0, 4)?;
        let opened = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        let mut last = opened;
        while last < u32::MAX && self.is_open(last + 1)? {
            last += 1;
        }
        let mut open = BTreeSet::new();
        for fd in (given..=last).filter(|fd| *fd != opened) {
            if self.is_open(fd)? {
                open.insert(fd);
            }
        }
        // The guest may continue and must find everything as it was.
        self.ask("fd_close", (opened as i32,))?;
        Ok(open)
    }
}

/// Compares the descriptors that `host` has now with those that a call of `stores` gets.
///
/// # Errors
/// [`WarmError::Descriptors`] names the first that differs.
pub(crate) fn check(stores: &Stores, host: &mut Host) -> Result<(), WarmError> {
    // Descriptors of a file tree are part of the saved state.
    if !host.has_used_p1() || host.files().is_some() {
        return Ok(());
    }
    let store = stores.make()?;
    let found = match stores.way {
        CallPath::Direct | CallPath::Deep => find(store, host),
        // Asking waits for files, which a task of a runtime must not do on its thread.
        CallPath::Fiber => std::thread::scope(|scope| {
            let asked = scope.spawn(|| find(store, host)).join();
            asked.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        }),
    };
    match found.map_err(WarmError::Instantiate)? {
        None => Ok(()),
        Some(what) => Err(WarmError::Descriptors(what)),
    }
}

fn find(store: Store<Host>, host: &mut Host) -> wasmtime::Result<Option<String>> {
    let directories = host.directories() as u32;
    let given = STANDARD + directories;
    let mut asker = Asker::new(store)?;
    let then = asker.see_all(given)?;
    // Its table is swapped into the querying store and back, so nothing is added to the guest's.
    asker.store.data_mut().swap_wasi(host);
    let found = asker.compare(&then, given, directories);
    asker.store.data_mut().swap_wasi(host);
    found
}

impl Asker {
    fn see_all(&mut self, given: u32) -> wasmtime::Result<Vec<DescriptorState>> {
        (0..given).map(|fd| self.see(fd)).collect()
    }

    /// The differences between `then` and now.
    fn compare(
        &mut self,
        then: &[DescriptorState],
        given: u32,
        directories: u32,
    ) -> wasmtime::Result<Option<String>> {
        for (fd, then) in (0..).zip(then) {
            let now = self.see(fd)?;
            if now == *then {
                continue;
            }
            let what = if now.is_none() { "closed" } else { "changed" };
            return Ok(Some(format!("{what} descriptor {fd}, which each call is given anew")));
        }
        // Without a directory nothing can be opened.
        if directories == 0 {
            return Ok(None);
        }
        let open = self.beyond(given, STANDARD)?;
        let Some(fd) = open.first() else { return Ok(None) };
        let many = match open.len() {
            1 => "a file or directory".to_owned(),
            many => format!("{many} files or directories"),
        };
        Ok(Some(format!("left {many} open that it had opened, the first being descriptor {fd}")))
    }
}

//! The two modules that tables are about, made from nothing.
//!
//! * small: 64 KiB of data, 8 functions.
//! * large: 3000 functions, a table of 2000 entries that a function writes, 400 mutable globals
//!   that functions set, 1.5 MiB of data.
//!
//! Both export `empty`, `scatter64` (one word in each of 64 pages, 20 KiB apart) and `dirty1m` (one
//! word in each of 256 consecutive pages) and `grow` (16 Wasm pages more, a word written in each).

use wasm_encoder::{
    BlockType, CodeSection, ConstExpr, DataSection, ElementSection, Elements, EntityType,
    ExportKind, ExportSection, Function, FunctionSection, GlobalSection, GlobalType, ImportSection,
    InstructionSink, MemArg, MemorySection, MemoryType, Module, RefType, TableSection, TableType,
    TypeSection, ValType,
};

/// Where `dirty1m` writes, in bytes, and how much it covers.
pub const DIRTY: (usize, usize) = (256 << 10, 1 << 20);
/// Where `scatter64` writes first, and the distance between its pages.
pub const SCATTER: (usize, usize) = (128 << 10, 20 << 10);

/// The shape of a module.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Name in the tables.
    pub name: &'static str,
    functions: u32,
    table: u32,
    globals: u32,
    data: usize,
}

/// 64 KiB of data, 8 functions.
pub const SMALL_MODULE: Shape =
    Shape { name: "small", functions: 8, table: 0, globals: 1, data: 64 << 10 };
/// 3000 functions, 2000 table entries, 400 mutable globals, 1.5 MiB of data.
pub const LARGE_MODULE: Shape =
    Shape { name: "large", functions: 3000, table: 2000, globals: 400, data: 3 << 19 };

const WORD: MemArg = MemArg { offset: 0, align: 2, memory_index: 0 };

/// `for (i = 0; i < count; i++) memory[from + i * step] += 1`
fn touch(from: usize, step: usize, count: usize) -> Function {
    let mut function = Function::new([(1, ValType::I32)]);
    let mut code: InstructionSink<'_> = function.instructions();
    code.i32_const(from as i32).local_set(0);
    code.loop_(BlockType::Empty);
    code.local_get(0).local_get(0).i32_load(WORD).i32_const(1).i32_add().i32_store(WORD);
    code.local_get(0).i32_const(step as i32).i32_add().local_tee(0);
    code.i32_const((from + step * count) as i32).i32_lt_u().br_if(0);
    code.end().end();
    function
}

/// Grows the memory by 16 Wasm pages and writes a word in each.
fn grow() -> Function {
    let mut function = Function::new([(1, ValType::I32)]);
    let mut code: InstructionSink<'_> = function.instructions();
    code.i32_const(16).memory_grow(0).i32_const(16).i32_shl().local_set(0);
    for n in 0..16u64 {
        let place = MemArg { offset: n << 16, ..WORD };
        code.local_get(0).i32_const(1).i32_store(place);
    }
    code.end();
    function
}

/// Functions that stand before the module's ordinary ones: the import and the four above.
const FIRST: u32 = 5;

impl Shape {
    /// The binary.
    #[must_use]
    pub fn module(&self) -> Vec<u8> {
        let mut types = TypeSection::new();
        types.ty().function([], []);
        types.ty().function([ValType::I32], [ValType::I32]);
        let mut imports = ImportSection::new();
        // Real modules import something; an unused import costs instantiation its share.
        imports.import("wasi_snapshot_preview1", "sched_yield", EntityType::Function(2));
        types.ty().function([], [ValType::I32]);
        let mut functions = FunctionSection::new();
        let mut code = CodeSection::new();
        for body in [
            Function::new([]),
            touch(SCATTER.0, SCATTER.1, 64),
            touch(DIRTY.0, 4096, DIRTY.1 / 4096),
            grow(),
        ] {
            let mut body = body;
            if body.byte_len() <= 1 {
                body.instructions().end();
            }
            functions.function(0);
            code.function(&body);
        }
        for n in FIRST - 1..self.functions {
            let mut body = Function::new([]);
            let mut sink = body.instructions();
            sink.local_get(0).i32_const(n as i32).i32_mul();
            let global = n % self.globals;
            sink.global_get(global).i32_add().global_set(global);
            if self.table > 0 && n == FIRST - 1 {
                sink.local_get(0).ref_func(FIRST).table_set(0);
            }
            sink.global_get(global).end();
            functions.function(1);
            code.function(&body);
        }
        let mut tables = TableSection::new();
        let mut elements = ElementSection::new();
        if self.table > 0 {
            tables.table(TableType {
                element_type: RefType::FUNCREF,
                table64: false,
                minimum: u64::from(self.table),
                maximum: None,
                shared: false,
            });
            let entries: Vec<u32> =
                (0..self.table).map(|n| FIRST + n % (self.functions - FIRST)).collect();
            elements.active(Some(0), &ConstExpr::i32_const(0), Elements::Functions(entries.into()));
        }
        let mut memories = MemorySection::new();
        memories.memory(MemoryType {
            minimum: 40,
            maximum: None,
            memory64: false,
            shared: false,
            page_size_log2: None,
        });
        let mut globals = GlobalSection::new();
        for n in 0..self.globals {
            let ty = GlobalType { val_type: ValType::I32, mutable: true, shared: false };
            globals.global(ty, &ConstExpr::i32_const(n as i32));
        }
        let mut exports = ExportSection::new();
        exports.export("memory", ExportKind::Memory, 0);
        for (n, name) in (1..).zip(["empty", "scatter64", "dirty1m", "grow"]) {
            exports.export(name, ExportKind::Func, n);
        }
        // Every other function can be called, so analysis must take all they change for changeable.
        for n in FIRST..self.functions.min(400 + FIRST) {
            exports.export(&format!("f{n}"), ExportKind::Func, n);
        }
        let mut data = DataSection::new();
        let bytes = (0..self.data).map(|n| (n * 31 % 251) as u8 | 1);
        data.active(0, &ConstExpr::i32_const(0), bytes.collect::<Vec<u8>>());

        let mut module = Module::new();
        module.section(&types).section(&imports).section(&functions);
        if self.table > 0 {
            module.section(&tables);
        }
        module.section(&memories).section(&globals).section(&exports);
        if self.table > 0 {
            module.section(&elements);
        }
        module.section(&code).section(&data);
        module.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_modules_are_valid_and_as_large_as_their_names_say() {
        for shape in [SMALL_MODULE, LARGE_MODULE] {
            let wasm = shape.module();
            wasmparser::Validator::new().validate_all(&wasm).unwrap();
            assert!(wasm.len() > shape.data);
        }
    }
}

//! Plug-ins of Extism: linked over Extism's kernel, with functions that take and give bytes as any
//! handler here does.
//!
//! A plug-in exports functions without parameters. Their input and output are in the memory of the
//! kernel, a module of Extism that the plug-in imports as [`KERNEL`]; it imports host functions by
//! the same name.
//!
//! Promises: a function of the whole equals the plug-in under Extism's own library: the kernel is
//! reset, the input is written there, the function is called, and its answer is the kernel's
//! output. A failure, by a message or by a status, is reported to the host through [`FAILED`].
//!
//! May break it: a kernel that is not the first module, for input goes to the first memory;
//! [`linked`] sees to that.

use wasm_encoder::{
    CodeSection, EntityType, ExportKind, ExportSection, Function, FunctionSection, ImportSection,
    Module, StartSection, TypeSection, ValType,
};
use wasmparser::{ExternalKind, FuncType, Parser, Payload, Validator};

use crate::link::{LinkError, link_over};
use crate::model::features;
use crate::names;

/// The plug-ins' import module for the kernel and for host functions.
pub const KERNEL: &str = "extism:host/env";

/// The host's function that ends a call which failed: `(status: i32)`, with the kernel's error.
pub const FAILED: (&str, &str) = ("afresh:extism", "failed");

/// The module that has the whole's exports.
const ADAPTER: &str = "afresh:extism/adapter";

/// The kernel functions that the adapter calls, each `(i64...) -> i64?`.
const OF_KERNEL: [(&str, usize, bool); 6] = [
    ("reset", 0, false),
    ("alloc", 1, true),
    ("input_set", 2, false),
    ("output_offset", 0, true),
    ("output_length", 0, true),
    ("error_get", 0, true),
];

/// The function that runs before a plug-in's first function, as in Extism, if `_initialize` does
/// not exist.
const CONSTRUCTORS: &str = "__wasm_call_ctors";
const HASKELL: &str = "hs_init";

/// An export that the adapter calls.
struct Export {
    name: String,
    ty: FuncType,
}

/// The functions that a module exports.
fn functions(name: &str, wasm: &[u8]) -> Result<Vec<Export>, LinkError> {
    let mut exports = Vec::new();
    let invalid = |error| LinkError::Invalid { what: format!("the module {name:?}"), error };
    let types = Validator::new_with_features(features()).validate_all(wasm).map_err(invalid)?;
    for payload in Parser::new(0).parse_all(wasm) {
        let Payload::ExportSection(section) = payload.map_err(invalid)? else { continue };
        for export in section {
            let export = export.map_err(invalid)?;
            if let ExternalKind::Func | ExternalKind::FuncExact = export.kind {
                let ty = types[types.as_ref().core_function_at(export.index)].unwrap_func().clone();
                exports.push(Export { name: export.name.to_owned(), ty });
            }
        }
    }
    Ok(exports)
}

/// Makes one module of the Extism kernel and a plug-in: the last of `modules`, by their names. It
/// may import from the others. Each of its exports without parameters, and with no result or a
/// status, becomes one of the form `(len: i32) -> i64`, in addition to `afresh_buffer`.
///
/// # Errors
/// [`LinkError`], also for a module that is not a kernel.
pub fn linked(kernel: &[u8], modules: &[(&str, &[u8])]) -> Result<Vec<u8>, LinkError> {
    let Some((name, plugin)) = modules.last() else {
        return Err(LinkError::Names("there is no plug-in to link".to_owned()));
    };
    let known = functions(KERNEL, kernel)?;
    for (needed, params, results) in OF_KERNEL {
        let all_long =
            |types: &[wasmparser::ValType]| types.iter().all(|ty| *ty == wasmparser::ValType::I64);
        let fits = |ty: &FuncType| {
            (ty.params().len(), ty.results().len()) == (params, usize::from(results))
                && all_long(ty.params())
                && all_long(ty.results())
        };
        if !known.iter().any(|export| export.name == needed && fits(&export.ty)) {
            return Err(LinkError::Import {
                module: (*name).to_owned(),
                from: KERNEL.to_owned(),
                name: needed.to_owned(),
                reason: "the module given as Extism's kernel has no such function".to_owned(),
            });
        }
    }
    let adapter = adapter(name, &functions(name, plugin)?);
    let mut all = modules.to_vec();
    all.push((ADAPTER, &adapter));
    link_over((KERNEL, kernel), &all)
}

/// The adapter under way: a module that only imports and calls.
#[derive(Default)]
struct Adapter {
    types: TypeSection,
    imports: ImportSection,
    functions: FunctionSection,
    exports: ExportSection,
    code: CodeSection,
    /// Functions there are, imports first.
    count: u32,
}

impl Adapter {
    fn ty(&mut self, params: Vec<ValType>, results: Vec<ValType>) -> u32 {
        self.types.ty().function(params, results);
        self.types.len() - 1
    }

    fn import(
        &mut self,
        (from, name): (&str, &str),
        params: Vec<ValType>,
        results: Vec<ValType>,
    ) -> u32 {
        let ty = self.ty(params, results);
        self.imports.import(from, name, EntityType::Function(ty));
        self.count += 1;
        self.count - 1
    }

    fn define(&mut self, params: Vec<ValType>, results: Vec<ValType>, body: &Function) -> u32 {
        let ty = self.ty(params, results);
        self.functions.function(ty);
        self.code.function(body);
        self.count += 1;
        self.count - 1
    }
}

fn adapter(plugin: &str, exports: &[Export]) -> Vec<u8> {
    let mut whole = Adapter::default();
    let [reset, alloc, input_set, output_offset, output_length, error_get] =
        OF_KERNEL.map(|(name, params, result)| {
            let results = if result { vec![ValType::I64] } else { Vec::new() };
            whole.import((KERNEL, name), vec![ValType::I64; params], results)
        });
    let failed = whole.import(FAILED, vec![ValType::I32], Vec::new());
    let has = |name: &str, params: &[wasmparser::ValType]| {
        exports.iter().any(|export| {
            export.name == name && export.ty.params() == params && export.ty.results().is_empty()
        })
    };
    let initializes = has("_initialize", &[]);
    let haskell = has(HASKELL, &[wasmparser::ValType::I32; 2])
        .then(|| whole.import((plugin, HASKELL), vec![ValType::I32; 2], Vec::new()));
    let constructors = (!initializes && has(CONSTRUCTORS, &[]))
        .then(|| whole.import((plugin, CONSTRUCTORS), Vec::new(), Vec::new()));
    let plain = |export: &&Export| {
        export.ty.params().is_empty()
            && matches!(export.ty.results(), [] | [wasmparser::ValType::I32])
            && !["_initialize", CONSTRUCTORS].contains(&&*export.name)
    };
    let mut handlers = Vec::new();
    for export in exports.iter().filter(plain) {
        let status = !export.ty.results().is_empty();
        let results = if status { vec![ValType::I32] } else { Vec::new() };
        let function = whole.import((plugin, &export.name), Vec::new(), results);
        handlers.push((&*export.name, function, status));
    }

    // The kernel drops the state of the last call, as in Extism, and receives the input.
    let mut body = Function::new([(1, ValType::I64)]);
    body.instructions()
        .call(reset)
        .local_get(0)
        .i64_extend_i32_u()
        .call(alloc)
        .local_tee(1)
        .local_get(0)
        .i64_extend_i32_u()
        .call(input_set)
        .local_get(1)
        .i32_wrap_i64()
        .end();
    let buffer = whole.define(vec![ValType::I32], vec![ValType::I32], &body);
    whole.exports.export(names::BUFFER, ExportKind::Func, buffer);

    for (name, function, status) in handlers {
        let mut body = Function::new([(1, ValType::I32)]);
        let mut sink = body.instructions();
        sink.call(function);
        if status {
            sink.local_set(1);
        }
        sink.local_get(1).call(error_get).i64_const(0).i64_ne().i32_or();
        sink.if_(wasm_encoder::BlockType::Empty).local_get(1).call(failed).unreachable().end();
        sink.call(output_offset).i64_const(32).i64_shl().call(output_length).i64_or().end();
        let handler = whole.define(vec![ValType::I32], vec![ValType::I64], &body);
        whole.exports.export(name, ExportKind::Func, handler);
    }

    let mut start = None;
    if haskell.is_some() || constructors.is_some() {
        let mut body = Function::new([]);
        let mut sink = body.instructions();
        if let Some(constructors) = constructors {
            sink.call(constructors);
        }
        if let Some(haskell) = haskell {
            sink.i32_const(0).i32_const(0).call(haskell);
        }
        sink.end();
        start = Some(whole.define(Vec::new(), Vec::new(), &body));
    }
    let mut module = Module::new();
    module.section(&whole.types).section(&whole.imports).section(&whole.functions);
    module.section(&whole.exports);
    if let Some(function_index) = start {
        module.section(&StartSection { function_index });
    }
    module.section(&whole.code);
    module.finish()
}

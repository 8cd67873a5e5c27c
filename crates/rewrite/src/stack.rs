//! The stack size that a guest was built for.
//!
//! A linker that puts the guest's own stack first in memory (those of Rust, C for WASI and CPython
//! do) leaves its size in plain sight: the first global is the stack pointer, which starts at the
//! end of the stack, and no data is below. A guest linked with megabytes of that stack recurses
//! deeply, and takes about as much engine stack.
//!
//! A hint, not a fact: its users must bound it.

use wasmparser::{DataKind, Operator, Parser, Payload, ValType};

/// A module as far as it has been read.
#[derive(Default)]
struct ScannedModule {
    /// Whether the first global would be one that the module imports.
    imports: bool,
    pointer: Option<u64>,
    /// Where the lowest data begins.
    data: Option<u64>,
}

impl ScannedModule {
    fn stack(&self) -> Option<u64> {
        let pointer = self.pointer.filter(|_| !self.imports)?;
        self.data.is_none_or(|data| data >= pointer).then_some(pointer)
    }
}

/// Bytes of stack in memory that the module asks for, or the largest of all modules in a component;
/// `None` if unknown.
#[must_use]
pub fn linear_stack(wasm: &[u8]) -> Option<u64> {
    let (mut most, mut seen) = (None, ScannedModule::default());
    for payload in Parser::new(0).parse_all(wasm) {
        match payload.ok()? {
            Payload::Version { .. } => seen = ScannedModule::default(),
            Payload::ImportSection(section) => {
                seen.imports |= section.into_imports().any(|import| {
                    import.is_ok_and(|import| matches!(import.ty, wasmparser::TypeRef::Global(_)))
                });
            }
            Payload::GlobalSection(section) => {
                let first = section.into_iter().next().and_then(Result::ok);
                seen.pointer = first
                    .filter(|global| global.ty.mutable && global.ty.content_type == ValType::I32)
                    .and_then(|global| constant(global.init_expr.get_operators_reader()));
            }
            Payload::DataSection(section) => {
                for data in section.into_iter().filter_map(Result::ok) {
                    if let DataKind::Active { memory_index: 0, offset_expr } = data.kind {
                        let offset = constant(offset_expr.get_operators_reader()).unwrap_or(0);
                        seen.data = Some(seen.data.map_or(offset, |lowest| lowest.min(offset)));
                    }
                }
            }
            Payload::End(_) => most = most.max(std::mem::take(&mut seen).stack()),
            _ => {}
        }
    }
    most
}

/// The value of an expression with one constant.
fn constant(mut operators: wasmparser::OperatorsReader<'_>) -> Option<u64> {
    match operators.read().ok()? {
        Operator::I32Const { value } => Some(u64::from(value as u32)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Option<u64> {
        linear_stack(&wat::parse_str(text).unwrap())
    }

    #[test]
    fn a_stack_at_the_start_of_memory_is_recognised() {
        let module = r#"(module $m (memory 200)
            (global (mut i32) (i32.const 8388608)) (global (mut i32) (i32.const 5))
            (data (i32.const 8388608) "a") (data (i32.const 9000000) "b") (data "passive"))"#;
        assert_eq!(of(module), Some(8 << 20));
        let component = format!("(component (core {})", &module[1..]);
        assert_eq!(of(&component), Some(8 << 20));
    }

    #[test]
    fn other_globals_are_no_stack() {
        for text in [
            "(module)",
            "(module (memory 1) (global i32 (i32.const 65536)))",
            r#"(module (memory 1) (global (mut i32) (i32.const 65536)) (data (i32.const 8) "a"))"#,
            r#"(module (import "a" "b" (global i32)) (memory 1) (global (mut i32) (i32.const 8)))"#,
        ] {
            assert_eq!(of(text), None, "{text}");
        }
        assert_eq!(linear_stack(b"\0asm nothing"), None);
    }
}

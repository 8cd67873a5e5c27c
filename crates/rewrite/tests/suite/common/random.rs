//! Random values that are the same in every run.

use afresh_sys::SplitMix64;
use wasmtime::{HeapType, Ref, Val, ValType};

/// The tests run the same modules every time.
pub(crate) struct Random(SplitMix64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(SplitMix64::new(seed))
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0.next_word()
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        self.0.below(bound)
    }

    /// Small numbers, so that accesses are often in bounds.
    pub(crate) fn int(&mut self) -> u64 {
        let value = self.next();
        match value % 4 {
            0 => value,
            1 => value >> 48,
            _ => (value >> 32) % 8,
        }
    }

    pub(crate) fn value(&mut self, ty: &ValType) -> Option<Val> {
        Some(match ty {
            ValType::I32 => Val::I32(self.int() as i32),
            ValType::I64 => Val::I64(self.int() as i64),
            ValType::F32 => Val::F32((self.int() as f32).to_bits()),
            ValType::F64 => Val::F64((self.int() as f64).to_bits()),
            ValType::V128 => Val::V128(u128::from(self.next()).into()),
            ValType::Ref(ty) if ty.is_nullable() => match ty.heap_type().top() {
                HeapType::Func => Ref::Func(None),
                HeapType::Extern => Ref::Extern(None),
                HeapType::Exn => Ref::Exn(None),
                _ => Ref::Any(None),
            }
            .into(),
            ValType::Ref(_) => return None,
        })
    }
}

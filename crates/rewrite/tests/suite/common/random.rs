//! Random values that are the same in every run.

use wasmtime::{HeapType, Ref, Val, ValType};

/// SplitMix64: the tests run the same modules every time.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
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

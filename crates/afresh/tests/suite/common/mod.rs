//! Calling a session's module with numbers, and reproducible random programs.

use afresh::wasm::Val;
use afresh::{CallError, Session, SessionError};

pub(crate) mod machine;

pub(crate) const WASM_PAGE: usize = 65_536;

/// Calls `name`; its first result, or 0 where it has none.
pub(crate) fn val(
    session: &mut Session,
    name: &str,
    arguments: &[Val],
) -> Result<i64, SessionError> {
    let results = session.with(|lease| {
        let module = lease.as_module().expect("it is a module");
        let called = module.call(name, arguments);
        called.map_err(|e| {
            SessionError::from(CallError::Guest { function: name.to_owned(), source: e.into() })
        })
    })?;
    Ok(match results.first() {
        Some(Val::I32(value)) => i64::from(*value),
        Some(Val::I64(value)) => *value,
        _ => 0,
    })
}

pub(crate) fn ints<const N: usize>(values: [usize; N]) -> [Val; N] {
    values.map(|value| Val::I32(value as i32))
}

/// Words as a micro-VM takes them.
pub(crate) fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Xorshift; the seed must not be 0.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % bound
    }
}

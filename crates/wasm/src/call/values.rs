//! Arguments and results as text, for command lines.

use wasmtime::component::{self, Type};
use wasmtime::{FuncType, Val, ValType};

/// Text that is not a value of the expected type.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ArgumentError {
    /// Too few or too many.
    #[error("{given} arguments given, {wanted} wanted")]
    Count {
        /// The number of arguments given.
        given: usize,
        /// The number of parameters of the function.
        wanted: usize,
    },
    /// Not a value of the type.
    #[error("argument {position}: `{text}` is not of type {ty}")]
    Value {
        /// Which argument, from 1.
        position: usize,
        /// What was given.
        text: String,
        /// What was wanted.
        ty: String,
    },
}

fn integer(text: &str, bits: u32) -> Option<i64> {
    let (digits, radix) = match text.strip_prefix("0x") {
        Some(hex) => (hex, 16),
        None => (text, 10),
    };
    let value = i128::from_str_radix(digits, radix).ok()?;
    // Both readings of the bits are welcome: -1 and 4294967295 are the same i32.
    let fits = value >= -(1i128 << (bits - 1)) && value < (1i128 << bits);
    fits.then_some(value as i64)
}

/// Reads arguments for a function of type `ty`. Integers may be signed, unsigned or `0x…`.
///
/// # Errors
/// [`ArgumentError`] naming the argument.
pub fn parse_arguments(ty: &FuncType, texts: &[String]) -> Result<Vec<Val>, ArgumentError> {
    let wanted = ty.params().len();
    if texts.len() != wanted {
        return Err(ArgumentError::Count { given: texts.len(), wanted });
    }
    ty.params()
        .zip(texts)
        .enumerate()
        .map(|(i, (ty, text))| {
            let value = match ty {
                ValType::I32 => integer(text, 32).map(|v| Val::I32(v as i32)),
                ValType::I64 => integer(text, 64).map(Val::I64),
                ValType::F32 => text.parse::<f32>().ok().map(Val::from),
                ValType::F64 => text.parse::<f64>().ok().map(Val::from),
                _ => None,
            };
            value.ok_or_else(|| ArgumentError::Value {
                position: i + 1,
                text: text.clone(),
                ty: ty.to_string(),
            })
        })
        .collect()
}

/// A result as text.
#[must_use]
pub fn show_value(value: &Val) -> String {
    match value {
        Val::I32(v) => v.to_string(),
        Val::I64(v) => v.to_string(),
        Val::F32(bits) => f32::from_bits(*bits).to_string(),
        Val::F64(bits) => f64::from_bits(*bits).to_string(),
        Val::V128(v) => format!("{:#034x}", v.as_u128()),
        other => format!("{other:?}"),
    }
}

/// Reads an argument of a component function.
pub(crate) fn read_component_value(ty: &Type, text: &str) -> Option<component::Val> {
    use component::Val;
    Some(match ty {
        Type::Bool => Val::Bool(text.parse().ok()?),
        Type::U8 => Val::U8(text.parse().ok()?),
        Type::S8 => Val::S8(text.parse().ok()?),
        Type::U16 => Val::U16(text.parse().ok()?),
        Type::S16 => Val::S16(text.parse().ok()?),
        Type::U32 => Val::U32(text.parse().ok()?),
        Type::S32 => Val::S32(text.parse().ok()?),
        Type::U64 => Val::U64(text.parse().ok()?),
        Type::S64 => Val::S64(text.parse().ok()?),
        Type::Float32 => Val::Float32(text.parse().ok()?),
        Type::Float64 => Val::Float64(text.parse().ok()?),
        Type::Char => Val::Char(text.parse().ok()?),
        Type::String => Val::String(text.to_owned()),
        _ => return None,
    })
}

/// A component's result as text.
pub(crate) fn show_component_value(value: &component::Val) -> String {
    use component::Val;
    match value {
        Val::Bool(v) => v.to_string(),
        Val::U8(v) => v.to_string(),
        Val::S8(v) => v.to_string(),
        Val::U16(v) => v.to_string(),
        Val::S16(v) => v.to_string(),
        Val::U32(v) => v.to_string(),
        Val::S32(v) => v.to_string(),
        Val::U64(v) => v.to_string(),
        Val::S64(v) => v.to_string(),
        Val::Float32(v) => v.to_string(),
        Val::Float64(v) => v.to_string(),
        Val::Char(v) => v.to_string(),
        Val::String(v) => v.clone(),
        other => format!("{other:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ty(params: &[ValType]) -> FuncType {
        FuncType::new(&wasmtime::Engine::default(), params.iter().cloned(), [])
    }

    #[test]
    fn integers_are_read_signed_unsigned_and_hexadecimal() {
        let texts = ["-1", "4294967295", "0xff"].map(str::to_owned);
        let values = parse_arguments(&ty(&[ValType::I32, ValType::I32, ValType::I64]), &texts);
        assert!(matches!(values.unwrap()[..], [Val::I32(-1), Val::I32(-1), Val::I64(255)]));
    }

    #[test]
    fn a_wrong_argument_is_named() {
        let error = parse_arguments(&ty(&[ValType::I32]), &["4294967296".to_owned()]).unwrap_err();
        assert!(
            error.to_string().contains("argument 1: `4294967296` is not of type i32"),
            "{error}"
        );
        let error = parse_arguments(&ty(&[ValType::F32]), &[]).unwrap_err();
        assert_eq!(error, ArgumentError::Count { given: 0, wanted: 1 });
    }
}

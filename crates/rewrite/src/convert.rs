//! Types from the parser's form to the encoder's. Indices stay as they are.

use wasm_encoder::reencode::{Error, Reencode, RoundtripReencoder};
use wasm_encoder::{ConstExpr, RefType, TableType, ValType};

/// A type that only exists inside the parser; does not occur in a module parsed from bytes.
#[derive(Debug, thiserror::Error)]
#[error("a type of the module cannot be encoded again: {0}")]
pub struct ConvertError(String);

fn failed(error: Error) -> ConvertError {
    ConvertError(error.to_string())
}

pub(crate) fn val_type(ty: wasmparser::ValType) -> Result<ValType, ConvertError> {
    RoundtripReencoder.val_type(ty).map_err(failed)
}

pub(crate) fn ref_type(ty: wasmparser::RefType) -> Result<RefType, ConvertError> {
    RoundtripReencoder.ref_type(ty).map_err(failed)
}

pub(crate) fn table_type(ty: wasmparser::TableType) -> Result<TableType, ConvertError> {
    RoundtripReencoder.table_type(ty).map_err(failed)
}

pub(crate) fn const_expr(expr: wasmparser::ConstExpr<'_>) -> Result<ConstExpr, ConvertError> {
    RoundtripReencoder.const_expr(expr).map_err(failed)
}

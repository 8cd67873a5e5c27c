//! The positions, in the whole, of the items of one of several linked modules, and the check that
//! an export satisfies an import.

use std::convert::Infallible;

use wasm_encoder::reencode::{Error, Reencode};
use wasmparser::{ExternalKind, TypeRef};

/// The number of kinds of items that modules import and export.
pub(crate) const KINDS: usize = 5;

/// The number of a kind.
pub(crate) fn kind(of: ExternalKind) -> usize {
    match of {
        ExternalKind::Func | ExternalKind::FuncExact => 0,
        ExternalKind::Table => 1,
        ExternalKind::Memory => 2,
        ExternalKind::Global => 3,
        ExternalKind::Tag => 4,
    }
}

/// As [`kind`], for an import.
pub(crate) fn kind_of(ty: &TypeRef) -> usize {
    match ty {
        TypeRef::Func(_) | TypeRef::FuncExact(_) => 0,
        TypeRef::Table(_) => 1,
        TypeRef::Memory(_) => 2,
        TypeRef::Global(_) => 3,
        TypeRef::Tag(_) => 4,
    }
}

/// A module's index spaces: for each index, the one in the whole. Every index of a valid module is
/// there.
#[derive(Default)]
pub(crate) struct IndexSpaces {
    /// By kind.
    pub(crate) items: [Vec<u32>; KINDS],
    /// What came before.
    pub(crate) types: u32,
    pub(crate) elements: u32,
    pub(crate) data: u32,
}

impl Reencode for IndexSpaces {
    type Error = Infallible;

    fn type_index(&mut self, ty: u32) -> Result<u32, Error> {
        Ok(self.types + ty)
    }

    fn element_index(&mut self, element: u32) -> Result<u32, Error> {
        Ok(self.elements + element)
    }

    fn data_index(&mut self, data: u32) -> Result<u32, Error> {
        Ok(self.data + data)
    }

    fn function_index(&mut self, function: u32) -> Result<u32, Error> {
        Ok(self.items[0][function as usize])
    }

    fn table_index(&mut self, table: u32) -> Result<u32, Error> {
        Ok(self.items[1][table as usize])
    }

    fn memory_index(&mut self, memory: u32) -> Result<u32, Error> {
        Ok(self.items[2][memory as usize])
    }

    fn global_index(&mut self, global: u32) -> Result<u32, Error> {
        Ok(self.items[3][global as usize])
    }

    fn tag_index(&mut self, tag: u32) -> Result<u32, Error> {
        Ok(self.items[4][tag as usize])
    }
}

/// Whether sizes that are exported are within those that an import allows.
fn within(export: (u64, Option<u64>), import: (u64, Option<u64>)) -> Result<(), String> {
    if export.0 < import.0 {
        return Err(format!("it begins with {}, and {} are wanted", export.0, import.0));
    }
    match (export.1, import.1) {
        (_, None) => Ok(()),
        (Some(most), Some(wanted)) if most <= wanted => Ok(()),
        (most, Some(wanted)) => {
            let most = most.map_or("any size".to_owned(), |most| most.to_string());
            Err(format!("it may grow to {most}, and no more than {wanted} is wanted"))
        }
    }
}

/// Whether an export can satisfy an import, where validation of the whole does not check it: types
/// of functions, tags, elements and values are checked at their uses.
pub(crate) fn fits(export: &TypeRef, import: &TypeRef) -> Result<(), String> {
    match (export, import) {
        (TypeRef::Memory(export), TypeRef::Memory(import)) => {
            let form = |ty: &wasmparser::MemoryType| {
                (ty.memory64, ty.shared, ty.page_size_log2.unwrap_or(16))
            };
            if form(export) != form(import) {
                return Err("it is another form of memory".to_owned());
            }
            within((export.initial, export.maximum), (import.initial, import.maximum))
        }
        (TypeRef::Table(export), TypeRef::Table(import)) => {
            if (export.table64, export.shared) != (import.table64, import.shared) {
                return Err("it is another form of table".to_owned());
            }
            within((export.initial, export.maximum), (import.initial, import.maximum))
        }
        (TypeRef::Global(export), TypeRef::Global(import)) => {
            match (export.mutable, export.shared) == (import.mutable, import.shared) {
                true => Ok(()),
                false => Err("only one of the two is mutable".to_owned()),
            }
        }
        _ if kind_of(export) == kind_of(import) => Ok(()),
        _ => Err("it is of another kind".to_owned()),
    }
}

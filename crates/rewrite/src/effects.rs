//! The effects of one function body on the state of its instance.
//!
//! The proof of a restore rests on this list of instructions: a state-changing instruction missing
//! from it would go unnoticed. Modules are validated first with the proposals named in
//! [`crate::model`], so the set of possible instructions is closed.

use std::collections::BTreeSet;

use wasmparser::{FunctionBody, Operator};

/// Everything of interest in one function body.
#[derive(Debug, Default)]
pub(crate) struct Effects {
    /// Functions called directly.
    pub(crate) calls: BTreeSet<u32>,
    /// Functions whose reference is taken by `ref.func`.
    pub(crate) refs: BTreeSet<u32>,
    /// Calls through a table or a reference.
    pub(crate) indirect: bool,
    /// Globals written.
    pub(crate) global_sets: BTreeSet<u32>,
    /// Tables whose elements are written (growth included).
    pub(crate) table_writes: BTreeSet<u32>,
    /// Tables grown.
    pub(crate) table_grows: BTreeSet<u32>,
    /// Data segments dropped.
    pub(crate) data_drops: BTreeSet<u32>,
    /// Data segments read.
    pub(crate) data_uses: BTreeSet<u32>,
    /// Element segments dropped.
    pub(crate) elem_drops: BTreeSet<u32>,
    /// Element segments read.
    pub(crate) elem_uses: BTreeSet<u32>,
    /// The first instruction that changes a GC object in place.
    pub(crate) gc_write: Option<&'static str>,
    /// The first stack-switching instruction.
    pub(crate) stack_switch: Option<&'static str>,
}

impl Effects {
    /// Reads a body.
    pub(crate) fn of(body: &FunctionBody<'_>) -> wasmparser::Result<Self> {
        let mut effects = Self::default();
        let mut reader = body.get_operators_reader()?;
        while !reader.eof() {
            effects.add(&reader.read()?);
        }
        Ok(effects)
    }

    /// Whether the body holds an instruction that rewriting may replace.
    pub(crate) fn may_need_rewriting(&self) -> bool {
        !(self.table_writes.is_empty()
            && self.data_drops.is_empty()
            && self.data_uses.is_empty()
            && self.elem_drops.is_empty()
            && self.elem_uses.is_empty())
    }

    fn gc(&mut self, instruction: &'static str) {
        self.gc_write.get_or_insert(instruction);
    }

    fn switches(&mut self, instruction: &'static str) {
        self.stack_switch.get_or_insert(instruction);
    }

    fn add(&mut self, op: &Operator<'_>) {
        match *op {
            Operator::Call { function_index } | Operator::ReturnCall { function_index } => {
                self.calls.insert(function_index);
            }
            Operator::CallIndirect { .. }
            | Operator::ReturnCallIndirect { .. }
            | Operator::CallRef { .. }
            | Operator::ReturnCallRef { .. } => self.indirect = true,
            Operator::RefFunc { function_index } => {
                self.refs.insert(function_index);
            }
            Operator::GlobalSet { global_index } => {
                self.global_sets.insert(global_index);
            }
            Operator::TableSet { table } | Operator::TableFill { table } => {
                self.table_writes.insert(table);
            }
            Operator::TableCopy { dst_table, .. } => {
                self.table_writes.insert(dst_table);
            }
            Operator::TableGrow { table } => {
                self.table_writes.insert(table);
                self.table_grows.insert(table);
            }
            Operator::TableInit { elem_index, table } => {
                self.table_writes.insert(table);
                self.elem_uses.insert(elem_index);
            }
            Operator::ElemDrop { elem_index } => {
                self.elem_drops.insert(elem_index);
            }
            Operator::MemoryInit { data_index, .. } => {
                self.data_uses.insert(data_index);
            }
            Operator::DataDrop { data_index } => {
                self.data_drops.insert(data_index);
            }
            Operator::ArrayNewData { array_data_index, .. } => {
                self.data_uses.insert(array_data_index);
            }
            Operator::ArrayNewElem { array_elem_index, .. } => {
                self.elem_uses.insert(array_elem_index);
            }
            Operator::ArrayInitData { array_data_index, .. } => {
                self.data_uses.insert(array_data_index);
                self.gc("array.init_data");
            }
            Operator::ArrayInitElem { array_elem_index, .. } => {
                self.elem_uses.insert(array_elem_index);
                self.gc("array.init_elem");
            }
            Operator::StructSet { .. } => self.gc("struct.set"),
            Operator::ArraySet { .. } => self.gc("array.set"),
            Operator::ArrayFill { .. } => self.gc("array.fill"),
            Operator::ArrayCopy { .. } => self.gc("array.copy"),
            Operator::ContNew { .. } => self.switches("cont.new"),
            Operator::ContBind { .. } => self.switches("cont.bind"),
            Operator::Suspend { .. } => self.switches("suspend"),
            Operator::Resume { .. } => self.resumes("resume"),
            Operator::ResumeThrow { .. } => self.resumes("resume_throw"),
            Operator::ResumeThrowRef { .. } => self.resumes("resume_throw_ref"),
            Operator::Switch { .. } => self.resumes("switch"),
            _ => {}
        }
    }

    /// A continuation starts or continues: as far as reachability goes, a call of any function
    /// whose address is taken.
    fn resumes(&mut self, instruction: &'static str) {
        self.indirect = true;
        self.switches(instruction);
    }
}

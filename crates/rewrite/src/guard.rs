//! Code that records changes by the guest: functions that do the work of one table or segment
//! instruction and record it.
//!
//! The promise: each function traps exactly when and as the instruction it stands for does, and
//! otherwise has the same effect. Notes are taken before the instruction, so that nothing which
//! ends it in its middle leaves a change without one: growth is the runtime's work, and a call hook
//! can end the call when that is done. A note may cover more than the change, or more than the
//! table has.
//!
//! A dropped segment is a flag, 0 or -1, kept in a global. A read of a dropped segment must trap
//! unless both its offset and its length are 0; setting every bit of the offset makes the original
//! instruction trap, with its own kind of trap, on any segment.

use std::collections::BTreeMap;

use wasm_encoder::{BlockType, Function, HeapType, InstructionSink, RefType, TableType, ValType};

use crate::emit::Additions;

/// The record of a table.
#[derive(Clone, Copy)]
pub(crate) struct Watch {
    /// The copy that a restore reads.
    pub(crate) shadow: u32,
    /// Global: no element below this index has changed.
    pub(crate) low: u32,
    /// Global: no element from this index on has changed.
    pub(crate) high: u32,
    /// Whether the host may write the table, which leaves no note.
    pub(crate) by_host: bool,
}

/// The instruction that a function stands for, by its immediates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum GuardedInstruction {
    TableSet { table: u32 },
    TableFill { table: u32 },
    TableGrow { table: u32 },
    TableCopy { to: u32, from: u32 },
    TableInit { table: u32, segment: u32 },
    MemoryInit { memory: u32, segment: u32 },
    ArrayNewData { ty: u32, segment: u32 },
    ArrayNewElem { ty: u32, segment: u32 },
    ArrayInitData { ty: u32, segment: u32 },
    ArrayInitElem { ty: u32, segment: u32 },
}

/// Everything that is recorded, and the functions that do it.
#[derive(Default)]
pub(crate) struct Guards {
    /// Types of all tables.
    pub(crate) tables: Vec<TableType>,
    /// Index types of all memories.
    pub(crate) memories: Vec<ValType>,
    /// Tables whose changes are recorded.
    pub(crate) watched: BTreeMap<u32, Watch>,
    /// Global that is nonzero once a watched table has grown.
    pub(crate) grown: Option<u32>,
    /// Flags of data segments, by segment.
    pub(crate) data_flags: BTreeMap<u32, u32>,
    /// Flags of element segments, by segment.
    pub(crate) elem_flags: BTreeMap<u32, u32>,
    /// Functions made so far.
    pub(crate) functions: BTreeMap<GuardedInstruction, u32>,
}

/// Lowers (or raises) global `bound` to the value of local `value`.
fn widen(sink: &mut InstructionSink<'_>, index: ValType, value: u32, bound: u32, lower: bool) {
    sink.local_get(value).global_get(bound).local_get(value).global_get(bound);
    match (index, lower) {
        (ValType::I64, true) => sink.i64_lt_u(),
        (ValType::I64, false) => sink.i64_gt_u(),
        (_, true) => sink.i32_lt_u(),
        (_, false) => sink.i32_gt_u(),
    };
    sink.select().global_set(bound);
}

impl Guards {
    fn table(&self, table: u32) -> TableType {
        self.tables[table as usize]
    }

    /// The function for an instruction, made on first use; `None` if nothing is recorded.
    pub(crate) fn function(
        &mut self,
        guarded: GuardedInstruction,
        add: &mut Additions,
    ) -> Option<u32> {
        if !self.records(guarded) {
            return None;
        }
        if let Some(&function) = self.functions.get(&guarded) {
            return Some(function);
        }
        let function = self.build(guarded, add);
        self.functions.insert(guarded, function);
        Some(function)
    }

    fn records(&self, guarded: GuardedInstruction) -> bool {
        match guarded {
            GuardedInstruction::TableSet { table }
            | GuardedInstruction::TableFill { table }
            | GuardedInstruction::TableGrow { table }
            | GuardedInstruction::TableCopy { to: table, .. } => self.watched.contains_key(&table),
            GuardedInstruction::TableInit { table, segment } => {
                self.watched.contains_key(&table) || self.elem_flags.contains_key(&segment)
            }
            GuardedInstruction::MemoryInit { segment, .. }
            | GuardedInstruction::ArrayNewData { segment, .. }
            | GuardedInstruction::ArrayInitData { segment, .. } => {
                self.data_flags.contains_key(&segment)
            }
            GuardedInstruction::ArrayNewElem { segment, .. }
            | GuardedInstruction::ArrayInitElem { segment, .. } => {
                self.elem_flags.contains_key(&segment)
            }
        }
    }

    /// Notes that elements from local `start` up to the value of local `end` are about to change.
    /// An end beyond the range of the index wraps around; then the instruction traps, and changes
    /// nothing.
    fn mark(&self, table: u32, start: u32, end: u32, sink: &mut InstructionSink<'_>) {
        if let Some(watch) = self.watched.get(&table) {
            let index = self.table(table).index_type();
            widen(sink, index, start, watch.low, true);
            widen(sink, index, end, watch.high, false);
        }
    }

    /// Pushes local `offset`, with every bit set if the segment was dropped and the read is not
    /// empty at 0.
    fn offset(flag: Option<&u32>, offset: u32, length: u32, sink: &mut InstructionSink<'_>) {
        sink.local_get(offset);
        if let Some(&flag) = flag {
            sink.global_get(flag).i32_const(0);
            sink.local_get(offset).local_get(length).i32_or();
            sink.select().i32_or();
        }
    }

    fn build(&self, guarded: GuardedInstruction, add: &mut Additions) -> u32 {
        let array = |ty| RefType { nullable: true, heap_type: HeapType::Concrete(ty) };
        match guarded {
            GuardedInstruction::TableSet { table } => {
                let ty = self.table(table);
                let index = ty.index_type();
                let mut f = Function::new([(1, index)]);
                let mut sink = f.instructions();
                set_end(&mut sink, index, 0, None, 2);
                self.mark(table, 0, 2, &mut sink);
                sink.local_get(0).local_get(1).table_set(table).end();
                add.function(&[index, ValType::Ref(ty.element_type)], &[], f)
            }
            GuardedInstruction::TableFill { table } => {
                let ty = self.table(table);
                let index = ty.index_type();
                let mut f = Function::new([(1, index)]);
                let mut sink = f.instructions();
                set_end(&mut sink, index, 0, Some((2, index)), 3);
                self.mark(table, 0, 3, &mut sink);
                sink.local_get(0).local_get(1).local_get(2).table_fill(table).end();
                add.function(&[index, ValType::Ref(ty.element_type), index], &[], f)
            }
            GuardedInstruction::TableGrow { table } => {
                let ty = self.table(table);
                let index = ty.index_type();
                let mut f = Function::new([(1, index), (1, ValType::I32)]);
                let mut sink = f.instructions();
                if let Some(grown) = self.grown {
                    sink.global_get(grown).local_set(3).i32_const(1).global_set(grown);
                }
                sink.local_get(0).local_get(1).table_grow(table).local_tee(2);
                if let Some(grown) = self.grown {
                    // Grown unless it failed (-1) or added nothing.
                    if index == ValType::I64 {
                        sink.i64_const(-1).i64_ne().local_get(1).i64_const(0).i64_ne();
                    } else {
                        sink.i32_const(-1).i32_ne().local_get(1).i32_const(0).i32_ne();
                    }
                    sink.i32_and().local_get(3).i32_or().global_set(grown);
                } else {
                    sink.drop();
                }
                sink.local_get(2).end();
                add.function(&[ValType::Ref(ty.element_type), index], &[index], f)
            }
            GuardedInstruction::TableCopy { to, from } => {
                let (index, source) = (self.table(to).index_type(), self.table(from).index_type());
                let length = if index == source { index } else { ValType::I32 };
                let mut f = Function::new([(1, index)]);
                let mut sink = f.instructions();
                set_end(&mut sink, index, 0, Some((2, length)), 3);
                self.mark(to, 0, 3, &mut sink);
                sink.local_get(0).local_get(1).local_get(2).table_copy(to, from).end();
                add.function(&[index, source, length], &[], f)
            }
            GuardedInstruction::TableInit { table, segment } => {
                let index = self.table(table).index_type();
                let mut f = Function::new([(1, index)]);
                let mut sink = f.instructions();
                set_end(&mut sink, index, 0, Some((2, ValType::I32)), 3);
                self.mark(table, 0, 3, &mut sink);
                sink.local_get(0);
                Self::offset(self.elem_flags.get(&segment), 1, 2, &mut sink);
                sink.local_get(2).table_init(table, segment).end();
                add.function(&[index, ValType::I32, ValType::I32], &[], f)
            }
            GuardedInstruction::MemoryInit { memory, segment } => {
                let mut f = Function::new([]);
                let mut sink = f.instructions();
                sink.local_get(0);
                Self::offset(self.data_flags.get(&segment), 1, 2, &mut sink);
                sink.local_get(2).memory_init(memory, segment).end();
                let index = self.memories[memory as usize];
                add.function(&[index, ValType::I32, ValType::I32], &[], f)
            }
            GuardedInstruction::ArrayNewData { ty, segment }
            | GuardedInstruction::ArrayNewElem { ty, segment } => {
                let mut f = Function::new([]);
                let mut sink = f.instructions();
                if matches!(guarded, GuardedInstruction::ArrayNewData { .. }) {
                    Self::offset(self.data_flags.get(&segment), 0, 1, &mut sink);
                    sink.local_get(1).array_new_data(ty, segment);
                } else {
                    Self::offset(self.elem_flags.get(&segment), 0, 1, &mut sink);
                    sink.local_get(1).array_new_elem(ty, segment);
                }
                sink.end();
                let result = ValType::Ref(array(ty).nullable(false));
                add.function(&[ValType::I32, ValType::I32], &[result], f)
            }
            GuardedInstruction::ArrayInitData { ty, segment }
            | GuardedInstruction::ArrayInitElem { ty, segment } => {
                let mut f = Function::new([]);
                let mut sink = f.instructions();
                sink.local_get(0).local_get(1);
                if matches!(guarded, GuardedInstruction::ArrayInitData { .. }) {
                    Self::offset(self.data_flags.get(&segment), 2, 3, &mut sink);
                    sink.local_get(3).array_init_data(ty, segment);
                } else {
                    Self::offset(self.elem_flags.get(&segment), 2, 3, &mut sink);
                    sink.local_get(3).array_init_elem(ty, segment);
                }
                sink.end();
                let params = [ValType::Ref(array(ty)), ValType::I32, ValType::I32, ValType::I32];
                add.function(&params, &[], f)
            }
        }
    }

    /// Stores table `table` in its shadow, growing that first; returns 1 from the function if it
    /// cannot grow.
    pub(crate) fn save_table(&self, table: u32, sink: &mut InstructionSink<'_>) {
        let Some(&Watch { shadow, .. }) = self.watched.get(&table) else { return };
        let ty = self.table(table);
        let wide = ty.index_type() == ValType::I64;
        sink.table_size(table).table_size(shadow);
        if wide {
            sink.i64_gt_u()
        } else {
            sink.i32_gt_u()
        };
        sink.if_(BlockType::Empty).ref_null(ty.element_type.heap_type);
        sink.table_size(table).table_size(shadow);
        if wide {
            sink.i64_sub()
        } else {
            sink.i32_sub()
        };
        sink.table_grow(shadow);
        if wide {
            sink.i64_const(-1).i64_eq()
        } else {
            sink.i32_const(-1).i32_eq()
        };
        sink.if_(BlockType::Empty).i32_const(1).return_().end().end();
        if wide {
            sink.i64_const(0).i64_const(0)
        } else {
            sink.i32_const(0).i32_const(0)
        };
        sink.table_size(table).table_copy(shadow, table);
        self.clear_marks(table, sink);
    }

    fn clear_marks(&self, table: u32, sink: &mut InstructionSink<'_>) {
        let Some(&Watch { low, high, .. }) = self.watched.get(&table) else { return };
        if self.table(table).index_type() == ValType::I64 {
            sink.i64_const(-1).global_set(low).i64_const(0).global_set(high);
        } else {
            sink.i32_const(-1).global_set(low).i32_const(0).global_set(high);
        }
    }

    /// Returns 1 from the function if the host has grown `table`.
    pub(crate) fn check_size(&self, table: u32, sink: &mut InstructionSink<'_>) {
        let Some(&Watch { shadow, by_host: true, .. }) = self.watched.get(&table) else { return };
        sink.table_size(table).table_size(shadow);
        if self.table(table).index_type() == ValType::I64 {
            sink.i64_ne()
        } else {
            sink.i32_ne()
        };
        sink.if_(BlockType::Empty).i32_const(1).return_().end();
    }

    /// Copies the changed elements of `table` back from its shadow.
    pub(crate) fn restore_table(&self, table: u32, sink: &mut InstructionSink<'_>) {
        let Some(&Watch { shadow, low, high, by_host }) = self.watched.get(&table) else { return };
        let ty = self.table(table);
        let wide = ty.index_type() == ValType::I64;
        if by_host {
            if wide {
                sink.i64_const(0)
            } else {
                sink.i32_const(0)
            };
            sink.global_set(low).table_size(table).global_set(high);
        } else {
            // The recorded range may have ended in a trap beyond the end of the table.
            sink.table_size(table).global_get(high).table_size(table).global_get(high);
            if wide {
                sink.i64_lt_u()
            } else {
                sink.i32_lt_u()
            };
            sink.select().global_set(high);
        }
        sink.global_get(low).global_get(high);
        if wide {
            sink.i64_lt_u()
        } else {
            sink.i32_lt_u()
        };
        sink.if_(BlockType::Empty);
        if ty.element_type.nullable {
            sink.global_get(low).global_get(low).global_get(high).global_get(low);
            if wide {
                sink.i64_sub()
            } else {
                sink.i32_sub()
            };
            sink.table_copy(table, shadow);
        } else {
            // The shadow's elements are nullable, so each must be checked for null.
            sink.loop_(BlockType::Empty).global_get(low);
            sink.global_get(low).table_get(shadow).ref_as_non_null().table_set(table);
            sink.global_get(low);
            if wide {
                sink.i64_const(1).i64_add()
            } else {
                sink.i32_const(1).i32_add()
            };
            sink.global_set(low).global_get(low).global_get(high);
            if wide {
                sink.i64_lt_u()
            } else {
                sink.i32_lt_u()
            };
            sink.br_if(0).end();
        }
        self.clear_marks(table, sink);
        sink.end();
    }
}

/// Sets local `to` to local `start` plus `length` (1 if none), in the table's index type.
fn set_end(
    sink: &mut InstructionSink<'_>,
    index: ValType,
    start: u32,
    length: Option<(u32, ValType)>,
    to: u32,
) {
    sink.local_get(start);
    match length {
        Some((length, ty)) => {
            sink.local_get(length);
            if index == ValType::I64 && ty == ValType::I32 {
                sink.i64_extend_i32_u();
            }
        }
        None if index == ValType::I64 => {
            sink.i64_const(1);
        }
        None => {
            sink.i32_const(1);
        }
    }
    if index == ValType::I64 {
        sink.i64_add()
    } else {
        sink.i32_add()
    };
    sink.local_set(to);
}

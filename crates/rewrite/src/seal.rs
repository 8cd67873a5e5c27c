//! Exports that must not be called once the state to come back to is saved.
//!
//! State that only they change is not restored, so the next call would see the effect of such a
//! call. Looking names up is not the only way to them: a host function that the guest calls can
//! take any export of its caller. So each of them gives way to a function that traps once a flag is
//! set, and does as the original before. References to the original stay: a function whose
//! reference is taken is reachable wherever the host is.

use wasm_encoder::{BlockType, ExportKind, ExportSection, Function, SectionId, ValType};
use wasmparser::ExternalKind;

use crate::analysis::Analysis;
use crate::emit::{Additions, Sections};
use crate::model::Model;

/// The flag, and the functions that look at it.
#[derive(Default)]
pub(crate) struct Seal {
    /// Global: nonzero once the state is saved. None when there is nothing to seal.
    pub(crate) flag: Option<u32>,
}

impl Seal {
    /// The function that stands for `function` until the seal: itself where a root can reach it
    /// anyway.
    pub(crate) fn over(
        &mut self,
        function: u32,
        model: &Model<'_>,
        analysis: &Analysis,
        add: &mut Additions,
    ) -> u32 {
        let ty = model.signatures.get(function as usize).copied();
        let params = ty.and_then(|ty| model.params.get(ty as usize).copied());
        let (Some(ty), Some(params), false) = (ty, params, analysis.reached.contains(&function))
        else {
            return function;
        };
        let flag = *self.flag.get_or_insert_with(|| add.default_global(ValType::I32));
        let mut body = Function::new([]);
        let mut sink = body.instructions();
        sink.global_get(flag).if_(BlockType::Empty).unreachable().end();
        for param in 0..params {
            sink.local_get(param);
        }
        sink.call(function).end();
        add.function_of(ty, body)
    }

    /// Replaces the module's exports by the sealed functions.
    pub(crate) fn exports(
        &mut self,
        model: &Model<'_>,
        analysis: &Analysis,
        add: &mut Additions,
        sections: &mut Sections,
    ) -> Result<(), wasmparser::Error> {
        let mut section = ExportSection::new();
        for export in &model.exports {
            let (kind, index) = match export.kind {
                ExternalKind::Func | ExternalKind::FuncExact => {
                    (ExportKind::Func, self.over(export.index, model, analysis, add))
                }
                ExternalKind::Table => (ExportKind::Table, export.index),
                ExternalKind::Memory => (ExportKind::Memory, export.index),
                ExternalKind::Global => (ExportKind::Global, export.index),
                ExternalKind::Tag => (ExportKind::Tag, export.index),
            };
            section.export(export.name, kind, index);
        }
        if self.flag.is_some() {
            sections.replace(SectionId::Export, &section)?;
        }
        Ok(())
    }
}

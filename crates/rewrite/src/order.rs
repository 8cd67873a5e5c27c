//! In which order a component instantiates its core modules.
//!
//! An engine asks for memories one by one while it instantiates a component; this order tells
//! which module each of them is for. It is known when every core module that is instantiated is
//! defined at the component's top level, and nested components, such as those that only rename
//! exports, instantiate none. Otherwise there is no answer here, rather than a guess.

use wasmparser::{
    ComponentAlias, ComponentExternalKind, ComponentInstance, ComponentOuterAliasKind,
    ComponentTypeRef, Instance, Parser, Payload,
};

/// Index spaces of the top level, as far as they matter.
#[derive(Default)]
struct Spaces {
    /// Modules by index: the place in the binary, or none for one from outside.
    modules: Vec<Option<usize>>,
    /// Components by index: whether instantiating one certainly instantiates no core module.
    components: Vec<bool>,
    order: Vec<usize>,
}

/// The modules instantiated, in order, each as its place among the modules of the binary.
pub(crate) fn instantiations(wasm: &[u8]) -> wasmparser::Result<Option<Vec<usize>>> {
    let mut spaces = Spaces::default();
    let mut depth = 0_u32;
    let mut seen = 0;
    let mut known = true;
    for payload in Parser::new(0).parse_all(wasm) {
        let payload = payload?;
        match &payload {
            Payload::ModuleSection { .. } => {
                if depth == 0 {
                    spaces.modules.push(Some(seen));
                }
                seen += 1;
                depth += 1;
            }
            Payload::ComponentSection { .. } => {
                if depth == 0 {
                    spaces.components.push(true);
                }
                depth += 1;
            }
            Payload::End(_) => depth = depth.saturating_sub(1),
            payload if depth == 0 => known &= spaces.top_level(payload)?,
            payload => {
                if instantiates(payload)?
                    && let Some(plain) = spaces.components.last_mut()
                {
                    *plain = false;
                }
            }
        }
    }
    Ok(known.then_some(spaces.order))
}

/// Whether a section of a nested component instantiates anything.
fn instantiates(payload: &Payload<'_>) -> wasmparser::Result<bool> {
    match payload {
        Payload::InstanceSection(reader) => {
            for instance in reader.clone() {
                if matches!(instance?, Instance::Instantiate { .. }) {
                    return Ok(true);
                }
            }
        }
        Payload::ComponentInstanceSection(reader) => {
            for instance in reader.clone() {
                if matches!(instance?, ComponentInstance::Instantiate { .. }) {
                    return Ok(true);
                }
            }
        }
        _ => {}
    }
    Ok(false)
}

impl Spaces {
    /// Follows one section; false once the order is unknown.
    fn top_level(&mut self, payload: &Payload<'_>) -> wasmparser::Result<bool> {
        match payload {
            Payload::ComponentImportSection(reader) => {
                for import in reader.clone() {
                    match import?.ty {
                        ComponentTypeRef::Module(_) => self.modules.push(None),
                        ComponentTypeRef::Component(_) => self.components.push(false),
                        _ => {}
                    }
                }
            }
            Payload::ComponentAliasSection(reader) => {
                for alias in reader.clone() {
                    self.alias(&alias?);
                }
            }
            Payload::ComponentExportSection(reader) => {
                for export in reader.clone() {
                    let export = export?;
                    let index = export.index as usize;
                    match export.kind {
                        ComponentExternalKind::Module => {
                            self.modules.push(self.modules.get(index).copied().flatten());
                        }
                        ComponentExternalKind::Component => {
                            self.components.push(self.components.get(index) == Some(&true));
                        }
                        _ => {}
                    }
                }
            }
            Payload::InstanceSection(reader) => {
                for instance in reader.clone() {
                    if let Instance::Instantiate { module_index, .. } = instance? {
                        match self.modules.get(module_index as usize) {
                            Some(Some(module)) => self.order.push(*module),
                            _ => return Ok(false),
                        }
                    }
                }
            }
            Payload::ComponentInstanceSection(reader) => {
                for instance in reader.clone() {
                    if let ComponentInstance::Instantiate { component_index, .. } = instance?
                        && self.components.get(component_index as usize) != Some(&true)
                    {
                        return Ok(false);
                    }
                }
            }
            _ => {}
        }
        Ok(true)
    }

    fn alias(&mut self, alias: &ComponentAlias<'_>) {
        match alias {
            ComponentAlias::InstanceExport { kind: ComponentExternalKind::Module, .. }
            | ComponentAlias::Outer { kind: ComponentOuterAliasKind::CoreModule, .. } => {
                self.modules.push(None);
            }
            ComponentAlias::InstanceExport { kind: ComponentExternalKind::Component, .. }
            | ComponentAlias::Outer { kind: ComponentOuterAliasKind::Component, .. } => {
                self.components.push(false);
            }
            _ => {}
        }
    }
}

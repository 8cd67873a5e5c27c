//! The instantiations in a component, and a way to every core instance in it.
//!
//! Each component, at any depth, gets one more export, an instance named [`STATE`]. It holds the
//! function that shows the state of each core instance the component makes, and the same instance
//! of each component it instantiates; so the outermost instance reaches all of them.
//!
//! Everything added stands at the end of its component, so no index of the original changes. Items
//! from outside, imported or from another instance, cannot be followed here; they are recorded as
//! unknown, and matter only where they are instantiated.

use wasm_encoder::{
    Alias, CanonicalFunctionSection, ComponentAliasSection, ComponentExportKind,
    ComponentExportSection, ComponentInstanceSection, ComponentSection, ComponentTypeSection,
    ComponentValType, ExportKind, PrimitiveValType,
};
use wasmparser::{
    BinaryReader, CanonicalFunction, ComponentAlias, ComponentCanonicalSectionReader,
    ComponentExportSectionReader, ComponentExternalKind, ComponentImportSectionReader,
    ComponentInstance, ComponentInstanceSectionReader, ComponentOuterAliasKind,
    ComponentTypeSectionReader, ExternalKind, Instance, InstanceSectionReader, SectionLimited,
};

use crate::component::{COMPONENT, CORE_MODULE, MAX_DEPTH, PrepareComponentError, each_section};
use crate::names::STATE;
use crate::reveal::READ;

/// Section ids of the component format.
const CORE_INSTANCE: u8 = 2;
const INSTANCE: u8 = 5;
const ALIAS: u8 = 6;
const TYPE: u8 = 7;
const CANONICAL: u8 = 8;
const IMPORT: u8 = 10;
const EXPORT: u8 = 11;

/// Maximum core instances of one component; more are refused rather than counted without end.
const MOST_INSTANCES: usize = 10_000;

/// One component of the binary.
#[derive(Debug, Clone, Default)]
struct Definition {
    /// Core instances: the module's place in the binary, and whether it shows anything.
    own: Vec<(usize, bool)>,
    /// Components instantiated, by their place among the definitions.
    children: Vec<usize>,
    /// Whether it has [`STATE`].
    shows: bool,
    /// The kind of an instantiated item that is unknown here.
    unknown: Option<&'static str>,
}

/// The way to one core instance of a component.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InstancePath {
    /// The exports to go through: instances, and then the function.
    pub path: Vec<String>,
    /// The position of its module among the modules of the component.
    pub module: usize,
}

/// A component with ways to all its core instances.
pub(crate) struct Nesting {
    definitions: Vec<Definition>,
    modules: usize,
}

/// Index spaces of one component, as far as they matter.
#[derive(Default)]
struct Spaces<'a> {
    parent: Option<&'a Spaces<'a>>,
    /// Modules by index: the place in the binary and whether it shows anything; none from outside.
    modules: Vec<Option<(usize, bool)>>,
    /// Components by index: the place among the definitions; none from outside.
    components: Vec<Option<usize>>,
    core_functions: u32,
    functions: u32,
    types: u32,
    core_instances: u32,
    instances: u32,
    /// Core instances made from modules that show something, by index.
    own: Vec<u32>,
    /// Instances of components that show something.
    shown: Vec<u32>,
    definition: Definition,
}

/// Replaces a core module, and returns whether the replacement shows its state.
type ReplaceModule<'a> = dyn FnMut(&[u8]) -> Result<(Vec<u8>, bool), PrepareComponentError> + 'a;

impl Nesting {
    /// Rewrites the component with `replace` for every core module, which also returns whether the
    /// replacement shows state.
    pub(crate) fn open(
        wasm: &[u8],
        replace: &mut ReplaceModule<'_>,
    ) -> Result<(Vec<u8>, Vec<InstancePath>), PrepareComponentError> {
        let mut nesting = Self { definitions: Vec::new(), modules: 0 };
        let (component, root) = nesting.level(wasm, None, 0, replace)?;
        let mut ways = Vec::new();
        let mut instances = 0;
        nesting.follow(root, &[], &mut ways, &mut instances)?;
        Ok((component, ways))
    }

    /// Rewrites one component and everything in it; returns its place among the definitions too.
    fn level(
        &mut self,
        wasm: &[u8],
        parent: Option<&Spaces<'_>>,
        depth: u32,
        replace: &mut ReplaceModule<'_>,
    ) -> Result<(Vec<u8>, usize), PrepareComponentError> {
        let mut spaces = Spaces { parent, ..Spaces::default() };
        let mut rewritten = each_section(wasm, depth, &mut |id, contents| match id {
            CORE_MODULE => {
                let (module, shows) = replace(contents)?;
                spaces.modules.push(Some((self.modules, shows)));
                self.modules += 1;
                Ok(Some(module))
            }
            COMPONENT => {
                let (component, place) = self.level(contents, Some(&spaces), depth + 1, replace)?;
                spaces.components.push(Some(place));
                Ok(Some(component))
            }
            _ => self.section(id, contents, &mut spaces).map(|()| None),
        })?;
        if !spaces.own.is_empty() || !spaces.shown.is_empty() {
            spaces.definition.shows = true;
            spaces.show(&mut rewritten);
        }
        self.definitions.push(spaces.definition);
        Ok((rewritten, self.definitions.len() - 1))
    }

    /// Follows one section that is neither a module nor a component.
    fn section(
        &self,
        id: u8,
        contents: &[u8],
        spaces: &mut Spaces<'_>,
    ) -> Result<(), PrepareComponentError> {
        let reader = BinaryReader::new(contents, 0);
        match id {
            CORE_INSTANCE => {
                for instance in InstanceSectionReader::new(reader)? {
                    if let Instance::Instantiate { module_index, .. } = instance? {
                        spaces.instantiate_module(module_index);
                    }
                    spaces.core_instances += 1;
                }
            }
            INSTANCE => {
                for instance in ComponentInstanceSectionReader::new(reader)? {
                    if let ComponentInstance::Instantiate { component_index, .. } = instance? {
                        self.instantiate_component(component_index, spaces);
                    }
                    spaces.instances += 1;
                }
            }
            ALIAS => {
                for alias in SectionLimited::<ComponentAlias<'_>>::new(reader)? {
                    spaces.alias(&alias?);
                }
            }
            TYPE => spaces.types += ComponentTypeSectionReader::new(reader)?.count(),
            CANONICAL => {
                for function in ComponentCanonicalSectionReader::new(reader)? {
                    match function? {
                        CanonicalFunction::Lift { .. } => spaces.functions += 1,
                        _ => spaces.core_functions += 1,
                    }
                }
            }
            IMPORT => {
                for import in ComponentImportSectionReader::new(reader)? {
                    spaces.define(import?.ty.kind());
                }
            }
            EXPORT => {
                for export in ComponentExportSectionReader::new(reader)? {
                    let export = export?;
                    if export.name.name == STATE {
                        return Err(PrepareComponentError::Reserved { name: STATE.to_owned() });
                    }
                    let index = export.index as usize;
                    match export.kind {
                        ComponentExternalKind::Module => {
                            let known = spaces.modules.get(index).copied().flatten();
                            spaces.modules.push(known);
                        }
                        // A component exported under another type may hide the additions made here.
                        ComponentExternalKind::Component => {
                            let known = spaces.components.get(index).copied().flatten();
                            spaces.components.push(known.filter(|_| export.ty.is_none()));
                        }
                        kind => spaces.define(kind),
                    }
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn instantiate_component(&self, component: u32, spaces: &mut Spaces<'_>) {
        let Some(Some(place)) = spaces.components.get(component as usize).copied() else {
            spaces.definition.unknown = Some("a component that it is given from outside");
            return;
        };
        spaces.definition.children.push(place);
        if self.definitions.get(place).is_some_and(|definition| definition.shows) {
            spaces.shown.push(spaces.instances);
        }
    }

    /// Collects the ways to all core instances of one instance of a definition.
    fn follow(
        &self,
        place: usize,
        path: &[String],
        ways: &mut Vec<InstancePath>,
        instances: &mut usize,
    ) -> Result<(), PrepareComponentError> {
        let Some(definition) = self.definitions.get(place) else { return Ok(()) };
        // Components side by side can instantiate one another, each the one before it.
        if path.len() > MAX_DEPTH as usize {
            return Err(PrepareComponentError::TooDeep);
        }
        if let Some(what) = definition.unknown {
            return Err(PrepareComponentError::Unknown { what });
        }
        *instances += definition.own.len() + 1;
        if *instances > MOST_INSTANCES {
            return Err(PrepareComponentError::TooManyInstances);
        }
        let here = if path.is_empty() { vec![STATE.to_owned()] } else { path.to_vec() };
        let below = |name: String| {
            let mut path = here.clone();
            path.push(name);
            path
        };
        let shows = definition.own.iter().filter(|(_, shows)| *shows);
        for (number, (module, _)) in shows.enumerate() {
            ways.push(InstancePath { path: below(core_name(number)), module: *module });
        }
        let mut shown = 0;
        for child in &definition.children {
            let shows = self.definitions.get(*child).is_some_and(|d| d.shows);
            self.follow(*child, &below(child_name(shown)), ways, instances)?;
            shown += usize::from(shows);
        }
        Ok(())
    }
}

fn core_name(number: usize) -> String {
    format!("core{number}")
}

fn child_name(number: usize) -> String {
    format!("component{number}")
}

impl Spaces<'_> {
    /// One more item from outside in the index space of `kind`.
    fn define(&mut self, kind: ComponentExternalKind) {
        match kind {
            ComponentExternalKind::Module => self.modules.push(None),
            ComponentExternalKind::Component => self.components.push(None),
            ComponentExternalKind::Func => self.functions += 1,
            ComponentExternalKind::Type => self.types += 1,
            ComponentExternalKind::Instance => self.instances += 1,
            ComponentExternalKind::Value => {}
        }
    }

    fn instantiate_module(&mut self, module: u32) {
        match self.modules.get(module as usize).copied().flatten() {
            Some((place, shows)) => {
                self.definition.own.push((place, shows));
                if shows {
                    self.own.push(self.core_instances);
                }
            }
            None => self.definition.unknown = Some("a core module that it is given from outside"),
        }
    }

    fn alias(&mut self, alias: &ComponentAlias<'_>) {
        match alias {
            ComponentAlias::InstanceExport { kind, .. } => self.define(*kind),
            ComponentAlias::CoreInstanceExport { kind, .. } => {
                if matches!(kind, ExternalKind::Func | ExternalKind::FuncExact) {
                    self.core_functions += 1;
                }
            }
            ComponentAlias::Outer { kind, count, index } => match kind {
                ComponentOuterAliasKind::CoreModule => {
                    let known = self
                        .outer(*count)
                        .and_then(|spaces| spaces.modules.get(*index as usize).copied().flatten());
                    self.modules.push(known);
                }
                ComponentOuterAliasKind::Component => {
                    let known = self.outer(*count).and_then(|spaces| {
                        spaces.components.get(*index as usize).copied().flatten()
                    });
                    self.components.push(known);
                }
                ComponentOuterAliasKind::Type => self.types += 1,
                ComponentOuterAliasKind::CoreType => {}
            },
        }
    }

    /// The index spaces `count` components further out.
    fn outer(&self, count: u32) -> Option<&Spaces<'_>> {
        let mut spaces: &Spaces<'_> = self;
        for _ in 0..count {
            spaces = spaces.parent?;
        }
        Some(spaces)
    }

    /// Appends the items that show the core instances.
    fn show(&self, component: &mut Vec<u8>) {
        let mut aliases = ComponentAliasSection::new();
        let mut types = ComponentTypeSection::new();
        let mut lifts = CanonicalFunctionSection::new();
        let mut exports: Vec<(String, ComponentExportKind, u32)> = Vec::new();
        types
            .function()
            .params([("item", ComponentValType::Primitive(PrimitiveValType::U32))])
            .result(Some(ComponentValType::Primitive(PrimitiveValType::U64)));
        for (number, instance) in (0u32..).zip(&self.own) {
            aliases.alias(Alias::CoreInstanceExport {
                instance: *instance,
                kind: ExportKind::Func,
                name: READ,
            });
            lifts.lift(self.core_functions + number, self.types, []);
            let function = self.functions + number;
            exports.push((core_name(number as usize), ComponentExportKind::Func, function));
        }
        for (number, instance) in (0u32..).zip(&self.shown) {
            aliases.alias(Alias::InstanceExport {
                instance: *instance,
                kind: ComponentExportKind::Instance,
                name: STATE,
            });
            let instance = self.instances + number;
            exports.push((child_name(number as usize), ComponentExportKind::Instance, instance));
        }
        let mut instances = ComponentInstanceSection::new();
        instances
            .export_items(exports.iter().map(|(name, kind, index)| (name.as_str(), *kind, *index)));
        let mut state = ComponentExportSection::new();
        let instance = self.instances + self.shown.len() as u32;
        state.export(STATE, ComponentExportKind::Instance, instance, None);
        aliases.append_to_component(component);
        types.append_to_component(component);
        lifts.append_to_component(component);
        instances.append_to_component(component);
        state.append_to_component(component);
    }
}

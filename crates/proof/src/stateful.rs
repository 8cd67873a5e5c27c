//! Random modules made of little but state: state machines over memories, globals, tables, segments, GC
//! objects and exceptions, with operands that are mostly in bounds.
//!
//! Each module exports `f0` to `f5` and `machine`, all `(param i32 i32) (result i64)`, which change and
//! read state, and `look`, which folds everything that can be seen from inside into one number: every
//! byte of every memory, every global, every element of every table. `clear` sets every reference to an
//! object to null, so that the state can be kept. `spoil` has the host spoil what belongs to the store
//! ([`meddling`]). Loops are bounded, and calls go only to functions made before, so that every call ends.

use std::fmt::Write;

use crate::meddling;
use crate::random::Random;

/// Number of functions in addition to the state machine.
pub const FUNCTIONS: usize = 6;
/// Functions that references point to.
const LEAVES: usize = 4;

/// Features of a module that reset mode refuses.
#[derive(Clone, Copy, Debug, Default)]
pub struct Features {
    /// Changes to GC objects in place, which reset mode refuses.
    pub gc_writes: bool,
    /// GC objects and exceptions in globals.
    pub objects: bool,
    /// GC objects in constant globals, which host functions change: reset mode refuses them.
    pub kept: bool,
}

struct Memory {
    wide: bool,
    maximum: usize,
}

struct Table {
    wide: bool,
    element: &'static str,
}

struct Shape {
    memories: Vec<Memory>,
    tables: Vec<Table>,
    /// Element types of the passive segments.
    elements: Vec<&'static str>,
    data: usize,
    features: Features,
}

fn constant(wide: bool, value: usize) -> String {
    format!("(i{}.const {value})", if wide { 64 } else { 32 })
}

/// A small index, mostly in bounds, at which a table is read or written.
fn index(random: &mut Random, wide: bool) -> String {
    let index = match random.below(4) {
        0 => "(i32.and (local.get 0) (i32.const 7))".to_owned(),
        1 if random.one_in(12) => "(local.get 1)".to_owned(),
        _ => format!("(i32.const {})", random.below(9)),
    };
    if wide { format!("(i64.extend_i32_u {index})") } else { index }
}

fn length(random: &mut Random, wide: bool) -> String {
    constant(wide, random.below(3))
}

/// An address anywhere in the first pages of a memory, near the borders of host pages too.
fn address(random: &mut Random, wide: bool) -> String {
    let page = random.below(15) * 4096;
    let base = match random.below(3) {
        0 => page + random.below(64),
        1 => (page + 4096).saturating_sub(random.below(16) + 1),
        _ => random.below(300),
    };
    let address = match random.below(5) {
        0 => format!("(i32.add (i32.const {base}) (i32.and (local.get 0) (i32.const 0xfff)))"),
        1 if random.one_in(12) => "(local.get 1)".to_owned(),
        2 => format!("(i32.mul (i32.and (global.get $state) (i32.const 15)) (i32.const {}))", 4096),
        _ => format!("(i32.const {base})"),
    };
    if wide { format!("(i64.extend_i32_u {address})") } else { address }
}

/// Adds an `i64` to the values that a function has read.
fn read(value: &str) -> String {
    format!("(local.set $acc (i64.add (i64.mul (local.get $acc) (i64.const 31)) {value}))")
}

fn extend(value: &str) -> String {
    format!("(i64.extend_i32_s {value})")
}

fn widen(wide: bool, value: &str) -> String {
    if wide { value.to_owned() } else { format!("(i64.extend_i32_u {value})") }
}

/// A reference that fits a table's element type.
fn reference(random: &mut Random, element: &str) -> String {
    let leaf = format!("(ref.func $leaf{})", random.below(LEAVES));
    match (element, random.below(3)) {
        ("externref", 0) => "(ref.null extern)".into(),
        ("externref", _) => "(call $object (local.get 0))".into(),
        ("i31ref", 0) => "(ref.null i31)".into(),
        ("i31ref", _) => "(ref.i31 (local.get 0))".into(),
        ("(ref $leaf)", _) | (_, 0) => leaf,
        ("funcref", 1) => "(ref.func $other)".into(),
        ("funcref", _) => "(ref.null func)".into(),
        _ => "(ref.null $leaf)".into(),
    }
}

/// Whether a passive segment of one type may fill a table of another.
fn fills(segment: &str, table: &str) -> bool {
    segment == table || (segment == "(ref null $leaf)" && table == "funcref")
}

impl Shape {
    fn random(random: &mut Random, features: Features) -> Self {
        const KINDS: [&str; 5] =
            ["funcref", "(ref null $leaf)", "externref", "(ref $leaf)", "i31ref"];
        let few = |random: &mut Random, most| random.below(most);
        Shape {
            memories: (0..few(random, 4))
                .map(|_| Memory { wide: random.one_in(3), maximum: 2 + random.below(5) })
                .collect(),
            tables: (0..few(random, 5))
                .map(|_| Table { wide: random.one_in(3), element: random.pick(&KINDS).1 })
                .collect(),
            elements: (0..few(random, 5)).map(|_| *random.pick(&KINDS[..4]).1).collect(),
            data: few(random, 5),
            features,
        }
    }

    fn global(&self, random: &mut Random) -> String {
        let small = index(random, false);
        match random.below(if self.features.objects { 11 } else { 8 }) {
            0 => format!("(global.set $i {small})"),
            1 => format!("(global.set $l (i64.mul (global.get $l) (i64.extend_i32_u {small})))"),
            2 => format!("(global.set $v (i32x4.splat (i32.add (local.get 0) {small})))"),
            3 => format!("(global.set $f (f32.convert_i32_s {small}))"),
            4 => "(global.set $d (f64.convert_i32_s (local.get 1)))".into(),
            5 => format!("(global.set $r {})", reference(random, "funcref")),
            6 => format!("(global.set $n {})", reference(random, "(ref $leaf)")),
            7 => format!("(global.set $e {})", reference(random, "externref")),
            8 => format!("(global.set $j {})", reference(random, "i31ref")),
            9 => "(global.set $o (struct.new $struct (local.get 0) (local.get 1)))".into(),
            _ => "(global.set $o (ref.null $struct))".into(),
        }
    }

    fn memory(&self, random: &mut Random) -> String {
        let Some(m) = (!self.memories.is_empty()).then(|| random.below(self.memories.len())) else {
            return self.global(random);
        };
        let wide = self.memories[m].wide;
        let to = address(random, wide);
        let value = "(i64.or (i64.extend_i32_s (local.get 0)) (i64.const 0x100))";
        match random.below(13) {
            0 | 1 => format!("(i32.store8 {m} {to} (i32.or (local.get 0) (i32.const 1)))"),
            2 | 3 => format!("(i64.store {m} {to} {value})"),
            4 => format!("(v128.store {m} {to} (global.get $v))"),
            5 => {
                let length = constant(wide, random.below(4000));
                format!("(memory.fill {m} {to} (local.get 0) {length})")
            }
            6 => {
                let from = random.below(self.memories.len());
                let source = self.memories[from].wide;
                let length = constant(wide && source, random.below(4000));
                format!("(memory.copy {m} {from} {to} {} {length})", address(random, source))
            }
            7 if self.data > 0 => {
                let d = random.below(self.data);
                format!(
                    "(memory.init {m} {d} {to} (i32.const {}) (i32.const {}))",
                    random.below(2),
                    random.below(3)
                )
            }
            // A run of pages: 4096 bytes apart, or more, or less.
            8 => format!(
                "(local.set $n (i32.const {}))
                (loop $again
                    (i32.store16 {m} {} (local.get $n))
                    (br_if $again (local.tee $n (i32.sub (local.get $n) (i32.const 1)))))",
                1 + random.below(16),
                match (wide, 64 << random.below(7)) {
                    (true, step) =>
                        format!("(i64.extend_i32_u (i32.mul (local.get $n) (i32.const {step})))"),
                    (false, step) => format!("(i32.mul (local.get $n) (i32.const {step}))"),
                }
            ),
            9 if random.one_in(3) => {
                let pages = constant(wide, random.below(3));
                read(&widen(wide, &format!("(memory.grow {m} {pages})")))
            }
            10 => read(&widen(wide, &format!("(memory.size {m})"))),
            _ => read(&format!("(i64.load {m} {to})")),
        }
    }

    fn table(&self, random: &mut Random) -> String {
        let Some(t) = (!self.tables.is_empty()).then(|| random.below(self.tables.len())) else {
            return self.memory(random);
        };
        let table = &self.tables[t];
        let at = index(random, table.wide);
        let value = reference(random, table.element);
        match random.below(12) {
            0..3 => format!("(table.set {t} {at} {value})"),
            3 => format!("(table.fill {t} {at} {value} {})", length(random, table.wide)),
            4 => {
                let fits: Vec<usize> = (0..self.tables.len())
                    .filter(|&from| self.tables[from].element == table.element)
                    .collect();
                let from = *random.pick(&fits).1;
                let source = self.tables[from].wide;
                let length = length(random, table.wide && source);
                format!("(table.copy {t} {from} {at} {} {length})", index(random, source))
            }
            5 | 6 => {
                let fits: Vec<usize> = (0..self.elements.len())
                    .filter(|&e| fills(self.elements[e], table.element))
                    .collect();
                if fits.is_empty() {
                    return self.memory(random);
                }
                // Segment 0 declares the functions.
                let e = random.pick(&fits).1 + 1;
                let from = random.below(2);
                let length = length(random, false);
                format!("(table.init {t} {e} {at} (i32.const {from}) {length})")
            }
            7 if random.one_in(4) => {
                let size = length(random, table.wide);
                read(&widen(table.wide, &format!("(table.grow {t} {value} {size})")))
            }
            8 => read(&widen(table.wide, &format!("(table.size {t})"))),
            9 if table.element == "funcref" => {
                let call = read(&extend(&format!("(call_indirect {t} (type $leaf) {at})")));
                match random.below(3) {
                    0 => call,
                    _ => format!("(if (ref.test (ref $leaf) (table.get {t} {at})) (then {call}))"),
                }
            }
            9 if table.element == "externref" => {
                read(&extend(&format!("(call $number (table.get {t} {at}))")))
            }
            _ => read(&extend(&format!("(ref.is_null (table.get {t} {at}))"))),
        }
    }

    fn segment(&self, random: &mut Random) -> String {
        match random.below(4) {
            0 if !self.elements.is_empty() && random.one_in(2) => {
                format!("(elem.drop {})", 1 + random.below(self.elements.len()))
            }
            1 if self.data > 0 => format!("(data.drop {})", random.below(self.data)),
            3 if self.data > 0 => {
                let d = random.below(self.data);
                read(&extend(&format!(
                    "(array.len (array.new_data $array {d} (i32.const {}) (i32.const {})))",
                    random.below(2),
                    random.below(3)
                )))
            }
            _ => self.table(random),
        }
    }

    fn object(&self, random: &mut Random) -> String {
        match random.below(if self.features.kept { 9 } else { 7 }) {
            7 => "(call $change (global.get $kept) (local.get 1))".into(),
            8 => "(call $alter (global.get $bytes) (local.get 0))".into(),
            0 if self.features.gc_writes => "(if (i32.eqz (ref.is_null (global.get $o)))
                    (then (struct.set $struct 1 (global.get $o) (local.get 1))))"
                .into(),
            1 if self.features.gc_writes => {
                "(local.set $a (array.new $array (local.get 0) (i32.const 5)))
                (array.set $array (local.get $a) (i32.const 2) (local.get 1))"
                    .to_owned()
                    + &read(&extend("(array.get_u $array (local.get $a) (i32.const 2))"))
            }
            0..3 => read(&extend(
                "(struct.get $struct 1 (struct.new $struct (local.get 1) (local.get 0)))",
            )),
            3 => format!(
                "(if (ref.is_null (global.get $o)) (then {}) (else {}))",
                if random.one_in(6) { "unreachable" } else { "(nop)" },
                read(&extend("(struct.get $struct 0 (global.get $o))"))
            ),
            // Garbage, and some of it.
            4 => format!(
                "(local.set $a (array.new $array (local.get 0) (i32.const {})))",
                random.below(5000)
            ),
            _ => read(&extend("(ref.is_null (global.get $o))")),
        }
    }

    fn control(&self, random: &mut Random, callees: usize) -> String {
        let call = (callees > 0).then(|| {
            let callee = random.below(callees);
            format!("(call $f{callee} (local.get 1) {})", index(random, false))
        });
        match (random.below(12), call) {
            (0..3, Some(call)) => read(&call),
            (3 | 4, Some(call)) => read(&format!(
                "(block $caught (result i64)
                    (i64.extend_i32_s (block $thrown (result i32)
                        (br $caught (try_table (result i64) (catch $tag $thrown) {call})))))"
            )),
            (5, Some(call)) => format!("(block $any (try_table (catch_all $any) {}))", read(&call)),
            (6, Some(call)) if self.features.objects => format!(
                "(block $done
                    (global.set $x (block $kept (result exnref)
                        (drop (try_table (result i64) (catch_all_ref $kept) {call}))
                        (br $done))))"
            ),
            (7, _) => format!(
                "(if (i32.eq (i32.and (local.get 0) (i32.const 15)) (i32.const {}))
                    (then (throw $tag (i32.add (local.get 1) (i32.const 1)))))",
                random.below(16)
            ),
            (8, _) => format!(
                "(if (i32.eq (i32.and (local.get 0) (i32.const 15)) (i32.const {}))
                    (then unreachable))",
                random.below(16)
            ),
            (9, _) => read(&extend("(i32.div_s (i32.const 1000) (local.get 1))")),
            (10, _) if self.features.objects => {
                "(if (i32.eq (i32.and (local.get 0) (i32.const 15)) (i32.const 5))
                    (then (throw_ref (global.get $x))))"
                    .into()
            }
            (11, _) => read(&extend("(call $host (local.get 0))")),
            _ => read(&extend("(call_ref $leaf (global.get $n))")),
        }
    }

    /// One statement.
    fn statement(&self, random: &mut Random, callees: usize) -> String {
        match random.below(21) {
            // Small enough that every choice of the host function is met.
            20 => read(&extend(&format!(
                "(call $touch (i32.const {}) (local.get 1))",
                random.below(32)
            ))),
            0..4 => self.global(random),
            4..10 => self.memory(random),
            10..14 => self.table(random),
            14 | 15 => self.segment(random),
            16 => self.object(random),
            _ => self.control(random, callees),
        }
    }

    fn statements(&self, random: &mut Random, most: usize, callees: usize) -> String {
        let mut text = String::new();
        for _ in 0..=random.below(most) {
            text += "\n        ";
            text += &self.statement(random, callees);
        }
        text
    }

    /// The body of `look`.
    fn look(&self) -> String {
        let mut text = String::new();
        let mut line = |value: String| {
            text += "\n        ";
            text += &value;
        };
        for value in [
            extend("(global.get $i)"),
            extend("(global.get $state)"),
            "(global.get $l)".into(),
            "(i64x2.extract_lane 0 (global.get $v))".into(),
            "(i64x2.extract_lane 1 (global.get $v))".into(),
            extend("(i32.reinterpret_f32 (global.get $f))"),
            "(i64.reinterpret_f64 (global.get $d))".into(),
            extend("(ref.is_null (global.get $r))"),
            extend("(call_ref $leaf (global.get $n))"),
            extend("(call $number (global.get $e))"),
        ] {
            line(read(&value));
        }
        if self.features.kept {
            line(read(&extend("(struct.get $struct 1 (global.get $kept))")));
            line(read(&extend("(array.get_u $array (global.get $bytes) (i32.const 0))")));
        }
        if self.features.objects {
            line(read(&extend("(ref.is_null (global.get $x))")));
            line(
                "(if (i32.eqz (ref.is_null (global.get $j)))
                    (then (local.set $acc (i64.add (local.get $acc)
                        (i64.extend_i32_s (i31.get_s (global.get $j)))))))"
                    .into(),
            );
            line(
                "(if (i32.eqz (ref.is_null (global.get $o)))
                    (then (local.set $acc (i64.add (local.get $acc)
                        (i64.extend_i32_s (struct.get $struct 1 (global.get $o)))))))"
                    .into(),
            );
        }
        for (t, table) in self.tables.iter().enumerate() {
            let at = if table.wide { "(local.get $at)" } else { "(i32.wrap_i64 (local.get $at))" };
            let value = match table.element {
                "externref" => format!("(call $number (table.get {t} {at}))"),
                "i31ref" => format!(
                    "(if (result i32) (ref.is_null (table.get {t} {at})) (then (i32.const -7))
                        (else (i31.get_s (table.get {t} {at}))))"
                ),
                _ => format!(
                    "(if (result i32) (ref.test (ref $leaf) (table.get {t} {at}))
                        (then (call_ref $leaf (ref.cast (ref $leaf) (table.get {t} {at}))))
                        (else (i32.sub (i32.const -3) (ref.is_null (table.get {t} {at})))))"
                ),
            };
            let size = widen(table.wide, &format!("(table.size {t})"));
            line(self.each(&size, 1, &extend(&value)));
        }
        for (m, memory) in self.memories.iter().enumerate() {
            let at = if memory.wide { "(local.get $at)" } else { "(i32.wrap_i64 (local.get $at))" };
            let size = widen(memory.wide, &format!("(memory.size {m})"));
            let bytes = format!("(i64.mul {size} (i64.const 65536))");
            line(self.each(&bytes, 8, &format!("(i64.load {m} {at})")));
        }
        text
    }

    /// The body of `clear`.
    fn clear(&self) -> String {
        let mut text =
            "(global.set $e (ref.null extern)) (global.set $o (ref.null $struct))".to_owned();
        if self.features.objects {
            text += " (global.set $j (ref.null i31)) (global.set $x (ref.null exn))";
        }
        for (t, table) in self.tables.iter().enumerate() {
            let null = match table.element {
                "externref" => "extern",
                "i31ref" => "i31",
                _ => continue,
            };
            let from = constant(table.wide, 0);
            text += &format!(" (table.fill {t} {from} (ref.null {null}) (table.size {t}))");
        }
        text
    }

    /// Folds `value` for every `$at` below `end`.
    fn each(&self, end: &str, step: usize, value: &str) -> String {
        format!(
            "(local.set $at (i64.const 0))
            (block $end (loop $next
                (br_if $end (i64.ge_u (local.get $at) {end}))
                {}
                (local.set $at (i64.add (local.get $at) (i64.const {step})))
                (br $next)))
            {}",
            read(value),
            read(end)
        )
    }
}

/// The text of a random module.
#[must_use]
pub fn module(random: &mut Random, features: Features) -> String {
    let shape = Shape::random(random, features);
    let mut text = String::from(
        "(module
    (type $leaf (func (result i32)))
    (type $other (func (param i32) (result i32)))
    (type $struct (struct (field i32) (field (mut i32))))
    (type $array (array (mut i8)))
    (type $step (func (param i32 i32) (result i64)))
    (import \"env\" \"host\" (func $host (param i32) (result i32)))
    (import \"env\" \"object\" (func $object (param i32) (result externref)))
    (import \"env\" \"number\" (func $number (param externref) (result i32)))
    (import \"env\" \"touch\" (func $touch (param i32 i32) (result i32)))
    (import \"env\" \"change\" (func $change (param structref i32)))
    (import \"env\" \"alter\" (func $alter (param arrayref i32)))
    (import \"env\" \"meddle\" (func $meddle))
    (tag $tag (param i32))\n",
    );
    // Writing to a string succeeds.
    let _ = declare(&mut text, random, &shape);
    for function in 0..FUNCTIONS {
        let body = shape.statements(random, 7, function);
        let _ = writeln!(text, "    (func $f{function} (export \"f{function}\") {LOCALS}{body}");
        let _ = match function.checked_sub(1).filter(|_| random.one_in(4)) {
            Some(last) => {
                writeln!(text, "        (return_call $f{last} (local.get 1) (i32.const 3)))")
            }
            None => writeln!(text, "        (local.get $acc))"),
        };
    }
    let states = 2 + random.below(4);
    let _ = writeln!(text, "    (func (export \"machine\") {LOCALS}");
    let labels: Vec<String> = (0..states).map(|state| format!("$s{state}")).collect();
    let blocks: String = labels.iter().rev().map(|label| format!("(block {label} ")).collect();
    let _ = writeln!(
        text,
        "        (block $out {blocks}(br_table {} $out (global.get $state)))",
        labels.join(" ")
    );
    for state in 0..states {
        let body = shape.statements(random, 5, FUNCTIONS);
        let next = random.below(states);
        let _ = writeln!(text, "{body}\n        (global.set $state (i32.const {next}))");
        let _ = writeln!(text, "        {}", if state + 1 < states { "(br $out))" } else { ")" });
    }
    let _ = writeln!(text, "        (local.get $acc))");
    let _ = writeln!(text, "    (func (export \"clear\"){})", shape.clear());
    let _ = writeln!(text, "    (func (export \"spoil\") (call $meddle))");
    let _ = writeln!(
        text,
        "    (func (export \"look\") (result i64) (local $acc i64) (local $at i64){}\n        (local.get $acc)))",
        shape.look()
    );
    text
}

const LOCALS: &str = "(type $step) (local $acc i64) (local $n i32) (local $a (ref null $array))";

/// The export of something under a name, in half of the modules: host functions reach what is exported.
fn exported(random: &mut Random, name: &str) -> String {
    if random.one_in(2) { format!("(export \"{name}\")") } else { String::new() }
}

/// Everything before the functions that change it.
fn declare(text: &mut String, random: &mut Random, shape: &Shape) -> std::fmt::Result {
    let index_type = |wide| if wide { "i64" } else { "i32" };
    for (t, table) in shape.tables.iter().enumerate() {
        let init = if table.element == "(ref $leaf)" { "(ref.func $leaf0)" } else { "" };
        let minimum = if random.one_in(6) { random.below(9) } else { 9 + random.below(5) };
        let index = index_type(table.wide);
        let export = exported(random, &meddling::table(t));
        writeln!(text, "    (table {export} {index} {minimum} 20 {} {init})", table.element)?;
    }
    let mut sizes = Vec::new();
    for (m, memory) in shape.memories.iter().enumerate() {
        let minimum = if random.one_in(6) { 0 } else { 1 + random.below(2) };
        sizes.push(minimum * 65536);
        let index = index_type(memory.wide);
        let export = exported(random, &meddling::memory(m));
        writeln!(text, "    (memory {export} {index} {minimum} {})", memory.maximum)?;
    }
    let exported = exported(random, meddling::GLOBAL);
    writeln!(
        text,
        "    (global $i {exported} (mut i32) (i32.const {})) (global $state (mut i32) (i32.const 0))
    (global $l (mut i64) (i64.const {})) (global $v (mut v128) (v128.const i64x2 1 2))
    (global $f (mut f32) (f32.const nan:0x200001)) (global $d (mut f64) (f64.const -0))
    (global $r (mut funcref) (ref.null func)) (global $n (mut (ref $leaf)) (ref.func $leaf1))
    (global $e (mut externref) (ref.null extern)) (global $o (mut (ref null $struct)) (ref.null $struct))",
        random.below(100),
        random.word()
    )?;
    if shape.features.objects {
        writeln!(
            text,
            "    (global $j (mut i31ref) {}) (global $x (mut exnref) (ref.null exn))",
            if random.one_in(4) { "(ref.i31 (i32.const 3))" } else { "(ref.null i31)" }
        )?;
    }
    if shape.features.kept {
        writeln!(
            text,
            "    (global $kept (ref $struct) (struct.new $struct (i32.const 1) (i32.const 2)))
    (global $bytes (ref $array) (array.new $array (i32.const 7) (i32.const 5)))"
        )?;
    }
    writeln!(text, "    (elem declare func $leaf0 $leaf1 $leaf2 $leaf3 $other)")?;
    for &element in &shape.elements {
        let items: Vec<String> = (0..2 + random.below(4))
            .map(|_| match element {
                "externref" => "(ref.null extern)".into(),
                _ => reference(random, element),
            })
            .collect();
        writeln!(text, "    (elem {element} {})", items.join(" "))?;
    }
    for (t, table) in shape.tables.iter().enumerate() {
        if table.element == "funcref" && random.one_in(2) {
            let at = constant(table.wide, random.below(4));
            writeln!(text, "    (elem (table {t}) {at} func $leaf2 $leaf3)")?;
        }
    }
    for _ in 0..shape.data {
        let memory = (!sizes.is_empty()).then(|| random.below(sizes.len()));
        match memory.filter(|m| sizes[*m] > 0 && random.one_in(3)) {
            Some(m) => {
                let at = random.below(sizes[m] / 4096) * 4096 + 4096 - random.below(5) - 6;
                let at = constant(shape.memories[m].wide, at);
                writeln!(text, "    (data (memory {m}) {at} \"active\")")?;
            }
            None => writeln!(text, "    (data \"{}\")", &"passive"[..2 + random.below(6)])?,
        }
    }
    for leaf in 0..LEAVES {
        writeln!(text, "    (func $leaf{leaf} (type $leaf) (i32.const {}))", leaf + 10)?;
    }
    writeln!(text, "    (func $other (type $other) (i32.add (local.get 0) (global.get $i)))")?;
    if random.one_in(3) {
        let memory = shape.memories.iter().zip(&sizes).position(|(m, size)| !m.wide && *size > 0);
        let store = match memory {
            Some(m) => format!("(i32.store {m} (i32.const 8000) (i32.const 99))"),
            None => String::new(),
        };
        writeln!(
            text,
            "    (func $start (global.set $l (i64.add (global.get $l) (i64.const 5))) {store}) (start $start)"
        )?;
    }
    Ok(())
}

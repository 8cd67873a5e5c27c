//! Outermost `const`, `let` and `class` of a script as variables, so that a later script may
//! declare the same names again, as at a console.
//!
//! Only the necessary part of the language is scanned: comments, strings, templates, regular
//! expressions, brackets and words. Promises: a script in which they do not end stays as it is, and
//! its evaluation reports the error. Lines keep their numbers.

use std::borrow::Cow;

/// Words after which an expression begins, so that a slash begins a regular expression.
const BEFORE_EXPRESSIONS: [&str; 15] = [
    "await",
    "case",
    "delete",
    "do",
    "else",
    "in",
    "instanceof",
    "new",
    "of",
    "return",
    "throw",
    "typeof",
    "void",
    "yield",
    "extends",
];

/// The script with a variable for each declaration at its outermost level.
pub(crate) fn as_variables(source: &str) -> Cow<'_, str> {
    if !["const", "let", "class"].into_iter().any(|word| source.contains(word)) {
        return source.into();
    }
    let mut scanner = Scanner { source, at: 0, opened: Vec::new(), last: "", ..Scanner::default() };
    if scanner.scan().is_none() || scanner.edits.is_empty() {
        return source.into();
    }
    let (mut changed, mut at) = (String::with_capacity(source.len() + 64), 0);
    for Edit { start, end, text } in scanner.edits {
        changed.push_str(&source[at..start]);
        changed.push_str(&text);
        at = end;
    }
    changed.push_str(&source[at..]);
    changed.into()
}

/// Text that replaces a part of the script. Edits are in order.
struct Edit {
    start: usize,
    end: usize,
    text: Cow<'static, str>,
}

/// The part of a `let` declaration that comes next.
#[derive(Clone, Copy, Default, PartialEq)]
enum LetPart {
    #[default]
    Outside,
    Name,
    /// The sign after a name, which ends here: a variable without an initial value gets
    /// `undefined`, because it may have a value from an earlier script.
    AfterName(usize),
    /// A value or a pattern. A comma outside of brackets ends it, and the next name follows.
    Value,
}

/// The part of a class declaration that comes next.
#[derive(Clone, Copy, Default, PartialEq)]
enum ClassPart {
    #[default]
    Outside,
    Head,
    Body,
}

#[derive(Default)]
struct Scanner<'a> {
    source: &'a str,
    at: usize,
    /// Open brackets. A backtick stands for a template that continues after the bracket.
    opened: Vec<char>,
    /// The last word or sign. A quote stands for a whole string, template or regular expression.
    last: &'a str,
    declared: LetPart,
    class: ClassPart,
    edits: Vec<Edit>,
}

fn is_word(sign: char) -> bool {
    sign.is_ascii_alphanumeric() || "_$#".contains(sign) || (!sign.is_ascii() && !is_space(sign))
}

fn is_space(sign: char) -> bool {
    sign.is_whitespace() || sign == '\u{feff}'
}

fn is_line_end(sign: char) -> bool {
    matches!(sign, '\n' | '\r' | '\u{2028}' | '\u{2029}')
}

/// The word at the start of a text.
fn word(text: &str) -> &str {
    &text[..text.find(|sign| !is_word(sign)).unwrap_or(text.len())]
}

/// A text without the spaces and comments at its start; `None` if a comment does not end.
fn skip(mut text: &str) -> Option<&str> {
    loop {
        let trimmed = text.trim_start_matches(is_space);
        text = if let Some(comment) = trimmed.strip_prefix("//") {
            &comment[comment.find(is_line_end).unwrap_or(comment.len())..]
        } else if let Some(comment) = trimmed.strip_prefix("/*") {
            &comment[comment.find("*/")? + 2..]
        } else {
            return Some(trimmed);
        };
    }
}

/// The length of a text to its end, which `ends` finds; a backslash hides the sign after it.
fn length(text: &str, mut ends: impl FnMut(char, &str) -> Option<usize>) -> Option<usize> {
    let mut signs = text.char_indices();
    while let Some((at, sign)) = signs.next() {
        if sign == '\\' {
            signs.next()?;
        } else if let Some(more) = ends(sign, &text[at..]) {
            return Some(at + more);
        }
    }
    None
}

/// The length of a string at the start of a text; `None` if it does not end in its line.
fn string(text: &str, quote: char) -> Option<usize> {
    let mut is_whole = true;
    let body = length(&text[1..], |sign, _| {
        is_whole = !matches!(sign, '\n' | '\r');
        (sign == quote || !is_whole).then_some(1)
    })?;
    is_whole.then_some(1 + body)
}

/// The length of a regular expression at the start of a text; `None` for a division.
fn regular_expression(text: &str) -> Option<usize> {
    let (mut in_class, mut is_open) = (false, true);
    let body = length(&text[1..], |sign, _| {
        match sign {
            '[' => in_class = true,
            ']' => in_class = false,
            '/' if !in_class => return Some(1),
            sign if is_line_end(sign) => {
                is_open = false;
                return Some(0);
            }
            _ => {}
        }
        None
    })?;
    is_open.then(|| 1 + body + word(&text[1 + body..]).len())
}

impl<'a> Scanner<'a> {
    /// Finds all edits; `None` if something does not end.
    fn scan(&mut self) -> Option<()> {
        loop {
            let rest = skip(&self.source[self.at..])?;
            let (end, at) = (self.at, self.source.len() - rest.len());
            self.at = at;
            let Some(sign) = rest.chars().next() else { break };
            let is_line = self.source[end..at].contains(is_line_end);
            let begins = is_line && self.begins_statement(end, rest);
            self.continue_let(sign, rest, begins);
            if is_word(sign) {
                self.word(word(rest))?;
            } else {
                self.sign(sign, rest)?;
            }
        }
        self.continue_let('\n', "", true);
        self.opened.is_empty().then_some(())
    }

    fn edit(&mut self, start: usize, end: usize, text: impl Into<Cow<'static, str>>) {
        self.edits.push(Edit { start, end, text: text.into() });
    }

    /// Whether the text at the start of a line begins a statement, instead of continuing the value
    /// that ends before it at `end`. A semicolon is inserted then.
    fn begins_statement(&self, end: usize, rest: &str) -> bool {
        let before = &self.source[..end];
        let ends_value = !self.is_before_expression()
            || self.last == "}"
            || before.ends_with("++")
            || before.ends_with("--");
        let continues = ["in", "instanceof"].contains(&word(rest))
            || rest.starts_with("!=")
            || rest.starts_with(|sign| ",.([`+-*/%<>=&|^?:;".contains(sign));
        ends_value && (!continues || rest.starts_with("++") || rest.starts_with("--"))
    }

    /// Continues a `let` declaration with the text that comes next, which may begin a statement.
    fn continue_let(&mut self, sign: char, rest: &str, begins: bool) {
        self.declared = match self.declared {
            LetPart::Value if !self.opened.is_empty() => LetPart::Value,
            LetPart::Value if sign == ',' => LetPart::Name,
            LetPart::Value if sign != ';' && !begins => LetPart::Value,
            LetPart::Name if matches!(sign, '[' | '{') => LetPart::Value,
            LetPart::AfterName(_) if sign == '=' && !rest.starts_with("==") => LetPart::Value,
            LetPart::Name if is_word(sign) => LetPart::AfterName(self.at + word(rest).len()),
            LetPart::AfterName(end) => {
                // A bracket in the next line would continue the value.
                self.edit(end, end, if sign == ',' { "=void 0" } else { "=void 0;" });
                if sign == ',' { LetPart::Name } else { LetPart::Outside }
            }
            _ => LetPart::Outside,
        };
    }

    fn word(&mut self, word: &'a str) -> Option<()> {
        let (start, end) = (self.at, self.at + word.len());
        (self.at, self.last) = (end, if self.opened.is_empty() { self.last } else { word });
        if !self.opened.is_empty() {
            return Some(());
        }
        let next = skip(&self.source[end..])?;
        let name = self::word(next);
        match word {
            "const" | "let" if self.last != "." => {
                let is_pattern = next.starts_with(['[', '{']);
                if is_pattern || !["", "in", "instanceof", "of"].contains(&name) {
                    // The columns of errors stay.
                    self.edit(start, end, if word == "let" { "var" } else { "var  " });
                    if word == "let" {
                        self.declared = LetPart::Name;
                    }
                }
            }
            "class" if self.may_begin_statement() && !["", "extends"].contains(&name) => {
                self.edit(start, start, format!("var {name} = "));
                self.class = ClassPart::Head;
            }
            // The class would end with the first of two bodies.
            "extends" if ["class", "function"].contains(&name) => return None,
            _ => {}
        }
        self.last = word;
        Some(())
    }

    /// Whether a statement may follow the last word or sign.
    fn may_begin_statement(&self) -> bool {
        ["", ";", "}", ")", "]", "'"].contains(&self.last)
            || (self.last.starts_with(is_word) && !self.is_before_expression())
    }

    /// Whether an expression, not an operator, follows the last word or sign.
    fn is_before_expression(&self) -> bool {
        if self.last.starts_with(is_word) {
            return BEFORE_EXPRESSIONS.contains(&self.last);
        }
        ![")", "]", "'"].contains(&self.last)
    }

    fn sign(&mut self, sign: char, rest: &'a str) -> Option<()> {
        let is_template = sign == '`' || (sign == '}' && self.opened.last() == Some(&'`'));
        let text = match sign {
            '\'' | '"' => Some(string(rest, sign)?),
            '/' if self.is_before_expression() => regular_expression(rest),
            _ => None,
        };
        if let Some(text) = text {
            (self.at, self.last) = (self.at + text, "'");
            return Some(());
        }
        if is_template {
            if sign == '}' {
                self.opened.pop();
            }
            let end = length(&rest[1..], |other, rest| match other {
                '`' => Some(1),
                _ => rest.starts_with("${").then_some(2),
            })? + 1;
            let continues = rest[..end].ends_with('{');
            (self.at, self.last) = (self.at + end, if continues { "{" } else { "'" });
            if continues {
                self.opened.push('`');
            }
            return Some(());
        }
        match sign {
            '(' | '[' | '{' => {
                let is_body = sign == '{' && self.opened.is_empty() && self.last != "extends";
                if is_body && self.class == ClassPart::Head {
                    self.class = ClassPart::Body;
                }
                self.opened.push(sign);
            }
            ')' | ']' | '}' => {
                self.opened.pop().filter(|open| *open != '`')?;
                if self.opened.is_empty() && self.class == ClassPart::Body {
                    self.edit(self.at + 1, self.at + 1, ";");
                    self.class = ClassPart::Outside;
                }
            }
            _ => {}
        }
        let length = sign.len_utf8();
        (self.at, self.last) = (self.at + length, &rest[..length]);
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::as_variables;

    #[test]
    fn outermost_declarations_become_variables() {
        for (source, wanted) in [
            ("const a = 1; { const b = 2 }", "var   a = 1; { const b = 2 }"),
            ("for (const x of y) {}\nconst [p] = q", "for (const x of y) {}\nvar   [p] = q"),
            ("a.const = 1; const\n{d} = e", "a.const = 1; var  \n{d} = e"),
            (
                "const r = /[/'] const '/.test(s); const t = 1",
                "var   r = /[/'] const '/.test(s); var   t = 1",
            ),
            ("x = (1) / 2; const y = 3 / 1 // const z", "x = (1) / 2; var   y = 3 / 1 // const z"),
            (
                "const u = `a${`${(() => { const i = 1 })()}`} const `; u",
                "var   u = `a${`${(() => { const i = 1 })()}`} const `; u",
            ),
            (
                "const s = 'it\\'s const'; const t = \"\\\"\"",
                "var   s = 'it\\'s const'; var   t = \"\\\"\"",
            ),
            ("const f = () => { let g = 1 }; f", "var   f = () => { let g = 1 }; f"),
            (
                "let a, b /* = */, c = 1, d\na",
                "var a=void 0, b=void 0 /* = */, c = 1, d=void 0;\na",
            ),
            ("let a = f(1, {x, y}), b", "var a = f(1, {x, y}), b=void 0;"),
            ("let {b, c} = d, e; f, g", "var {b, c} = d, e=void 0;; f, g"),
            ("let a, [b] = [1, 2], c\nd, e", "var a=void 0, [b] = [1, 2], c=void 0;\nd, e"),
            ("let a = 0\nb, c", "var a = 0\nb, c"),
            ("let a = () => {}\n++b, c", "var a = () => {}\n++b, c"),
            ("let a = b++ // +\n'c', d", "var a = b++ // +\n'c', d"),
            ("let a = b /*\n*/ !c, d", "var a = b /*\n*/ !c, d"),
            ("let a = // b\n1\n+ 2\n, c", "var a = // b\n1\n+ 2\n, c=void 0;"),
            ("let a = b\nin c, d", "var a = b\nin c, d=void 0;"),
            ("let a = b\n!= c, d", "var a = b\n!= c, d=void 0;"),
            ("let a\nlet {b} = c; let = 1", "var a=void 0;\nvar {b} = c; let = 1"),
            ("let \u{e9} = 1 == 2; let z", "var \u{e9} = 1 == 2; var z=void 0;"),
            (
                "f()\nclass A extends B({}) { x = {} }\n(1)",
                "f()\nvar A = class A extends B({}) { x = {} };\n(1)",
            ),
        ] {
            assert_eq!(as_variables(source), wanted);
        }
        for same in [
            "const left = '",
            "class A extends class B {} {}",
            "const left = {",
            "} const left = 1",
            "constant = 1; $const = 2; a.let; let_ = 3",
            "x = class A {}; (class B {}); new class C {}",
            "const left = `${",
            "const left = 'a\nb'",
            "const left = '\n",
            "const a = 1 /*",
        ] {
            assert_eq!(as_variables(same), same);
        }
    }
}

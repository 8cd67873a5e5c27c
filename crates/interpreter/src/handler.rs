//! The function of a guest that evaluates code.

use afresh::{Function, Guest};

use crate::request::CallConvention;

/// The handler of a guest that evaluates code, looked up once.
#[derive(Clone, Debug)]
pub struct Interpreter {
    /// Takes requests.
    pub handler: Function,
    /// The form of requests and answers.
    pub form: CallConvention,
}

impl Interpreter {
    /// That of a guest, if it has one.
    #[must_use]
    pub fn of(guest: &Guest) -> Option<Self> {
        #[cfg(linux_guests)]
        if let Some(language) = crate::Language::of_program(guest) {
            return Some(Self {
                handler: guest.function(language.form.function()).ok()?,
                form: language.form,
            });
        }
        let module = guest.as_module()?;
        CallConvention::ALL.into_iter().find_map(|form| {
            module.function_type(form.function()).ok()?;
            Some(Self { handler: guest.function(form.function()).ok()?, form })
        })
    }
}

//! Node-API, version 6: the functions of it that are used here, and the native functions that
//! JavaScript calls.
//!
//! The interface is a stable C ABI, and the process that loads the library has its symbols. It is
//! declared here because the bindings on crates.io bring about ten crates, and 22 functions are
//! enough.
//!
//! Promises: a handle of JavaScript is used only within the call that received it; a panic never
//! unwinds into Node.

use std::ffi::{c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{null, null_mut};
use std::sync::Arc;

use crate::environment::Environment;
use crate::error::Failure;
use crate::mailbox::{Event, EventKind, Mailbox, Queue, Wake};

/// Opaque types of Node-API.
pub(crate) type Env = *mut c_void;
type Value = *mut c_void;
type CallbackInfo = *mut c_void;
type ThreadsafeFunction = *mut c_void;
type Status = i32;

const OK: Status = 0;
/// The number of bytes of text that ends with 0.
const AUTO_LENGTH: usize = usize::MAX;
const NONBLOCKING: i32 = 0;
const ABORT: i32 = 1;
/// `napi_uint8_array`.
const UINT8_ARRAY: i32 = 1;

unsafe extern "C" {
    fn napi_create_function(
        env: Env,
        name: *const c_char,
        length: usize,
        callback: unsafe extern "C" fn(Env, CallbackInfo) -> Value,
        data: *mut c_void,
        result: *mut Value,
    ) -> Status;
    fn napi_set_named_property(env: Env, of: Value, name: *const c_char, value: Value) -> Status;
    fn napi_get_cb_info(
        env: Env,
        info: CallbackInfo,
        count: *mut usize,
        arguments: *mut Value,
        this: *mut Value,
        data: *mut *mut c_void,
    ) -> Status;
    fn napi_get_undefined(env: Env, result: *mut Value) -> Status;
    fn napi_create_uint32(env: Env, value: u32, result: *mut Value) -> Status;
    fn napi_get_value_uint32(env: Env, value: Value, result: *mut u32) -> Status;
    fn napi_create_string_utf8(
        env: Env,
        text: *const c_char,
        length: usize,
        result: *mut Value,
    ) -> Status;
    fn napi_get_value_string_utf8(
        env: Env,
        value: Value,
        to: *mut c_char,
        room: usize,
        length: *mut usize,
    ) -> Status;
    fn napi_create_buffer_copy(
        env: Env,
        length: usize,
        bytes: *const c_void,
        copy: *mut *mut c_void,
        result: *mut Value,
    ) -> Status;
    fn napi_is_typedarray(env: Env, value: Value, result: *mut bool) -> Status;
    fn napi_get_typedarray_info(
        env: Env,
        array: Value,
        kind: *mut i32,
        length: *mut usize,
        bytes: *mut *mut c_void,
        buffer: *mut Value,
        offset: *mut usize,
    ) -> Status;
    fn napi_get_and_clear_last_exception(env: Env, result: *mut Value) -> Status;
    fn napi_adjust_external_memory(env: Env, change: i64, result: *mut i64) -> Status;
    fn napi_throw_type_error(env: Env, code: *const c_char, message: *const c_char) -> Status;
    fn napi_call_function(
        env: Env,
        this: Value,
        function: Value,
        count: usize,
        arguments: *const Value,
        result: *mut Value,
    ) -> Status;
    fn napi_create_threadsafe_function(
        env: Env,
        function: Value,
        resource: Value,
        resource_name: Value,
        max_queue: usize,
        threads: usize,
        finalize_data: *mut c_void,
        finalize: Option<unsafe extern "C" fn(Env, *mut c_void, *mut c_void)>,
        context: *mut c_void,
        call: Option<unsafe extern "C" fn(Env, Value, *mut c_void, *mut c_void)>,
        result: *mut ThreadsafeFunction,
    ) -> Status;
    fn napi_call_threadsafe_function(
        function: ThreadsafeFunction,
        data: *mut c_void,
        mode: i32,
    ) -> Status;
    fn napi_release_threadsafe_function(function: ThreadsafeFunction, mode: i32) -> Status;
    fn napi_unref_threadsafe_function(env: Env, function: ThreadsafeFunction) -> Status;
    fn napi_add_env_cleanup_hook(
        env: Env,
        hook: unsafe extern "C" fn(*mut c_void),
        argument: *mut c_void,
    ) -> Status;
    fn napi_set_instance_data(
        env: Env,
        data: *mut c_void,
        finalize: Option<unsafe extern "C" fn(Env, *mut c_void, *mut c_void)>,
        hint: *mut c_void,
    ) -> Status;
    fn napi_get_instance_data(env: Env, data: *mut *mut c_void) -> Status;
}

/// The function of JavaScript that takes events, as threads wake it.
struct Waker(ThreadsafeFunction);

// SAFETY: a thread-safe function may be called from any thread (Node-API). It is freed only after
// the cleanup hook of its environment, which drops every `Waker` first.
unsafe impl Send for Waker {}

impl Wake for Waker {
    fn wake(&self) {
        // SAFETY: this object is a reference to the function, and Node frees it after the last one.
        // The data is not used.
        let _ = unsafe { napi_call_threadsafe_function(self.0, null_mut(), NONBLOCKING) };
    }
}

impl Drop for Waker {
    fn drop(&mut self) {
        // SAFETY: this is the only reference of the one thread that it was made for.
        let _ = unsafe { napi_release_threadsafe_function(self.0, ABORT) };
    }
}

/// The environment of this instance of the library: one for each thread of JavaScript.
fn environment<'a>(env: Env) -> Option<&'a Arc<Environment>> {
    let mut data = null_mut();
    // SAFETY: `env` is of the present call, and `data` has room for a pointer.
    if unsafe { napi_get_instance_data(env, &raw mut data) } != OK || data.is_null() {
        return None;
    }
    // SAFETY: `napi_register_module_v1` stored it, and it is freed when the environment ends: after
    // all calls in it.
    Some(unsafe { &*data.cast::<Arc<Environment>>() })
}

fn undefined(env: Env) -> Value {
    let mut value = null_mut();
    // SAFETY: `env` is of the present call, and `value` has room for a handle.
    let _ = unsafe { napi_get_undefined(env, &raw mut value) };
    value
}

/// The arguments of a call.
struct Arguments {
    env: Env,
    values: [Value; 3],
}

impl Arguments {
    fn of(env: Env, info: CallbackInfo) -> Self {
        let mut values = [undefined(env); 3];
        let mut count = values.len();
        // SAFETY: both handles are of the present call, and there is room for `count` arguments.
        // Missing ones are set to undefined.
        let _ = unsafe {
            napi_get_cb_info(env, info, &raw mut count, values.as_mut_ptr(), null_mut(), null_mut())
        };
        Self { env, values }
    }

    fn number(&self, at: usize) -> Result<u32, &'static std::ffi::CStr> {
        let mut number = 0;
        // SAFETY: the handles are of the present call, and the result has room.
        match unsafe { napi_get_value_uint32(self.env, self.values[at], &raw mut number) } {
            OK => Ok(number),
            _ => Err(c"the argument is no number"),
        }
    }

    fn text(&self, at: usize) -> Result<String, &'static std::ffi::CStr> {
        let (value, mut length) = (self.values[at], 0);
        // SAFETY: the handles are of the present call; without a buffer only the length is set.
        let measured =
            unsafe { napi_get_value_string_utf8(self.env, value, null_mut(), 0, &raw mut length) };
        if measured != OK {
            return Err(c"the argument is no string");
        }
        let mut text = vec![0u8; length + 1];
        // SAFETY: as above; the buffer has room for the text and its last 0.
        let read = unsafe {
            napi_get_value_string_utf8(
                self.env,
                value,
                text.as_mut_ptr().cast(),
                text.len(),
                &raw mut length,
            )
        };
        text.truncate(length);
        match read {
            OK => String::from_utf8(text).map_err(|_| c"the string is not valid Unicode"),
            _ => Err(c"the string cannot be read"),
        }
    }

    /// A copy of the bytes of a `Uint8Array`; none for another value.
    fn bytes(&self, at: usize) -> Vec<u8> {
        let (value, mut is_array) = (self.values[at], false);
        let (mut kind, mut length, mut bytes) = (0, 0, null_mut());
        // SAFETY: the handles are of the present call, and each result has room. The data of the
        // array stays where it is until JavaScript runs again, and is copied before.
        unsafe {
            let found = napi_is_typedarray(self.env, value, &raw mut is_array);
            if found != OK || !is_array {
                return Vec::new();
            }
            let read = napi_get_typedarray_info(
                self.env,
                value,
                &raw mut kind,
                &raw mut length,
                &raw mut bytes,
                null_mut(),
                null_mut(),
            );
            if read != OK || kind != UINT8_ARRAY || length == 0 || bytes.is_null() {
                return Vec::new();
            }
            std::slice::from_raw_parts(bytes.cast::<u8>(), length).to_vec()
        }
    }
}

/// Runs a native function; an error is thrown.
fn run(
    env: Env,
    info: CallbackInfo,
    work: impl FnOnce(&Arc<Environment>, &Arguments) -> Result<(), &'static std::ffi::CStr>,
) -> Value {
    let done = catch_unwind(AssertUnwindSafe(|| {
        let environment = environment(env).ok_or(c"the environment has ended")?;
        work(environment, &Arguments::of(env, info))
    }));
    let failed = match done {
        Ok(Ok(())) => return undefined(env),
        Ok(Err(message)) => message,
        Err(_) => c"afresh panicked; please report this",
    };
    // SAFETY: `env` is of the present call, and the text ends with 0.
    let _ = unsafe { napi_throw_type_error(env, null(), failed.as_ptr()) };
    undefined(env)
}

/// `start(number, request, bytes)`: begins an operation.
unsafe extern "C" fn start(env: Env, info: CallbackInfo) -> Value {
    run(env, info, |environment, given| {
        let (number, request) = (given.number(0)?, given.text(1)?);
        environment.start(number, request, given.bytes(2));
        Ok(())
    })
}

/// `stop(number)`: ends an operation.
unsafe extern "C" fn stop(env: Env, info: CallbackInfo) -> Value {
    run(env, info, |environment, given| {
        environment.stop(given.number(0)?);
        Ok(())
    })
}

/// `reply(number, tool call, bytes)`: answers a tool call of an operation.
unsafe extern "C" fn reply(env: Env, info: CallbackInfo) -> Value {
    run(env, info, |environment, given| {
        environment.reply(given.number(0)?, given.number(1)?, given.bytes(2));
        Ok(())
    })
}

/// `release(handle)`: frees a guest or a session, once no operation uses it.
unsafe extern "C" fn release(env: Env, info: CallbackInfo) -> Value {
    run(env, info, |environment, given| {
        environment.release(given.number(0)?);
        Ok(())
    })
}

/// `interrupt(handle, close)`: stops the call of a session; if `close` is 1, it is the last one.
unsafe extern "C" fn interrupt(env: Env, info: CallbackInfo) -> Value {
    run(env, info, |environment, given| {
        environment.interrupt(given.number(0)?, given.number(1)? == 1);
        Ok(())
    })
}

/// `account(bytes, frees)`: reports memory outside JavaScript's heap to the garbage collector,
/// which runs more often then; if `frees` is 1, it is no longer used.
unsafe extern "C" fn account(env: Env, info: CallbackInfo) -> Value {
    run(env, info, |_, given| {
        let bytes = i64::from(given.number(0)?);
        let change = if given.number(1)? == 1 { -bytes } else { bytes };
        let mut result = 0;
        // SAFETY: `env` is of the present call, and the result has room.
        let _ = unsafe { napi_adjust_external_memory(env, change, &raw mut result) };
        Ok(())
    })
}

/// `end()`: ends all operations and waits for them. Later ones are refused.
unsafe extern "C" fn end(env: Env, info: CallbackInfo) -> Value {
    run(env, info, |environment, _| {
        environment.end();
        Ok(())
    })
}

/// `listen(function)`: makes the function take all events.
unsafe extern "C" fn listen(env: Env, info: CallbackInfo) -> Value {
    run(env, info, |environment, given| {
        let mut name = null_mut();
        let mut function = null_mut();
        let queue = environment.mailbox().queue();
        let context = Arc::into_raw(queue).cast_mut().cast::<c_void>();
        // SAFETY: the handles are of the present call. The context is a reference that `finalize`
        // returns, which runs once after the last `deliver`.
        let made = unsafe {
            napi_create_string_utf8(env, c"afresh".as_ptr(), AUTO_LENGTH, &raw mut name);
            napi_create_threadsafe_function(
                env,
                given.values[0],
                null_mut(),
                name,
                0,
                1,
                context,
                Some(finalize),
                context,
                Some(deliver),
                &raw mut function,
            )
        };
        if made != OK {
            // SAFETY: nothing else has taken the reference.
            drop(unsafe { Arc::from_raw(context.cast::<Queue>()) });
            return Err(c"the argument is no function");
        }
        // SAFETY: `function` was just made in this environment. JavaScript keeps the loop alive
        // while it waits.
        let _ = unsafe { napi_unref_threadsafe_function(env, function) };
        environment.mailbox().open(Box::new(Waker(function)));
        let argument = Arc::into_raw(Arc::clone(environment)).cast_mut().cast::<c_void>();
        // SAFETY: hooks run once, the last added first: before the one with which Node frees the
        // function above.
        let _ = unsafe { napi_add_env_cleanup_hook(env, clean_up, argument) };
        Ok(())
    })
}

unsafe extern "C" fn finalize(_: Env, data: *mut c_void, _: *mut c_void) {
    // SAFETY: `listen` made the pointer from an `Arc`, and this runs once.
    drop(unsafe { Arc::from_raw(data.cast::<Queue>()) });
}

unsafe extern "C" fn clean_up(argument: *mut c_void) {
    // SAFETY: `listen` made the pointer from an `Arc`, and this runs once.
    let environment = unsafe { Arc::from_raw(argument.cast::<Environment>()) };
    // Nothing here may unwind into Node.
    let _ = catch_unwind(AssertUnwindSafe(|| environment.end()));
}

/// Gives JavaScript all queued events, on its own thread.
unsafe extern "C" fn deliver(env: Env, function: Value, context: *mut c_void, _: *mut c_void) {
    if env.is_null() || function.is_null() {
        return;
    }
    // SAFETY: the context is a reference that `finalize` has not returned yet.
    let queue = unsafe { &*context.cast::<Queue>() };
    // One for each wake: Node opens a scope for each, so that microtasks run in between.
    let Ok(Some(event)) = catch_unwind(AssertUnwindSafe(|| queue.take())) else { return };
    let values = arguments(env, &event).or_else(|| {
        let mut exception = null_mut();
        // SAFETY: `env` is of the present call, and the result has room. Without an exception it is
        // undefined.
        let _ = unsafe { napi_get_and_clear_last_exception(env, &raw mut exception) };
        // Its promise settles without it.
        if let Some(environment) = environment(env) {
            let _ = catch_unwind(AssertUnwindSafe(|| environment.stop(event.number)));
        }
        arguments(env, &unconverted(event.number))
    });
    if let Some(values) = values {
        let this = undefined(env);
        let mut result = null_mut();
        // The function itself throws nothing, except when the environment ends.
        // SAFETY: the handles are of the present call, and the result has room.
        let _ = unsafe {
            napi_call_function(env, this, function, values.len(), values.as_ptr(), &raw mut result)
        };
    }
    event.delivered();
}

/// An event as arguments for JavaScript; `None` where text or bytes exceed V8's limits, or memory
/// is short.
fn arguments(env: Env, event: &Event) -> Option<[Value; 5]> {
    let Event { number, kind, detail, text, bytes, .. } = event;
    let mut values = [null_mut(); 5];
    // SAFETY: `env` is of the present call, the results have room, and text and bytes are valid for
    // their lengths.
    let made = unsafe {
        [
            napi_create_uint32(env, *number, &raw mut values[0]),
            napi_create_uint32(env, *kind as u32, &raw mut values[1]),
            napi_create_uint32(env, *detail, &raw mut values[2]),
            napi_create_string_utf8(env, text.as_ptr().cast(), text.len(), &raw mut values[3]),
            napi_create_buffer_copy(
                env,
                bytes.len(),
                bytes.as_ptr().cast(),
                null_mut(),
                &raw mut values[4],
            ),
        ]
    };
    made.iter().all(|status| *status == OK).then_some(values)
}

/// The end of an operation whose event cannot be converted.
fn unconverted(number: u32) -> Event {
    let failure = Failure::marshal(
        "a result, output or request of the guest exceeds what JavaScript can hold: let the guest send less at a time",
    );
    let (kind, detail, text) = (EventKind::Failed, 0, failure.json().to_string());
    Event { number, kind, detail, text, bytes: Vec::new(), pending: None }
}

unsafe extern "C" fn free(_: Env, data: *mut c_void, _: *mut c_void) {
    // SAFETY: `napi_register_module_v1` made the pointer from a box, and this runs once.
    drop(unsafe { Box::from_raw(data.cast::<Arc<Environment>>()) });
}

/// Keeps the library mapped until the process ends. Handlers of signals and idle threads outlive
/// the worker thread whose environment loaded it.
fn pin() {
    // SAFETY: all zeroes are a valid value of the plain structure, which the call fills in. The
    // function is one of this library, so the name is that of its file, and the library is loaded
    // already.
    unsafe {
        let mut found: libc::Dl_info = std::mem::zeroed();
        if libc::dladdr(pin as fn() as *const c_void, &raw mut found) != 0 {
            let flags = libc::RTLD_LAZY | libc::RTLD_NOLOAD | libc::RTLD_NODELETE;
            libc::dlopen(found.dli_fname, flags);
        }
    }
}

/// The version of Node-API that is used.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn node_api_module_get_api_version_v1() -> i32 {
    6
}

/// Fills `exports` for one environment.
///
/// # Safety
/// Called by Node, with handles of a scope that is open.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn napi_register_module_v1(env: Env, exports: Value) -> Value {
    pin();
    let environment = Box::new(Arc::new(Environment::new(Mailbox::default())));
    let data = Box::into_raw(environment).cast::<c_void>();
    // SAFETY: `env` is of the present call, and `free` frees the data once.
    if unsafe { napi_set_instance_data(env, data, Some(free), null_mut()) } != OK {
        // SAFETY: the call failed, so the box still has one owner.
        drop(unsafe { Box::from_raw(data.cast::<Arc<Environment>>()) });
        return exports;
    }
    type Native = unsafe extern "C" fn(Env, CallbackInfo) -> Value;
    let functions: [(&std::ffi::CStr, Native); 8] = [
        (c"start", start),
        (c"stop", stop),
        (c"reply", reply),
        (c"release", release),
        (c"interrupt", interrupt),
        (c"account", account),
        (c"end", end),
        (c"listen", listen),
    ];
    for (name, function) in functions {
        let mut value = null_mut();
        // SAFETY: the handles are of the present call, and the names end with 0.
        unsafe {
            let made = napi_create_function(
                env,
                name.as_ptr(),
                AUTO_LENGTH,
                function,
                null_mut(),
                &raw mut value,
            );
            if made == OK {
                let _ = napi_set_named_property(env, exports, name.as_ptr(), value);
            }
        }
    }
    exports
}

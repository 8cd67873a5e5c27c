;; A plug-in that builds a table before it can answer, and answers out of it: `prepare` is what a host wants
;; done once, `handle` what it calls for each request.
(component
    (import "audit" (func $audit (param "n" u32)))
    (core func $lowered (canon lower (func $audit)))
    (core module $plugin
        (import "host" "audit" (func $audit (param i32)))
        (memory 16)
        (global $ready (mut i32) (i32.const 0))
        (global $handled (mut i32) (i32.const 0))
        ;; The number of steps in which `n` comes to 1 in Collatz' sequence, for all below 100,000.
        (func $build (local $n i32) (local $at i64) (local $steps i32)
            (local.set $n (i32.const 1))
            (loop $each
                (local.set $at (i64.extend_i32_u (local.get $n)))
                (local.set $steps (i32.const 0))
                (block $done (loop $step
                    (br_if $done (i64.eq (local.get $at) (i64.const 1)))
                    (local.set $at (if (result i64) (i64.eqz (i64.and (local.get $at) (i64.const 1)))
                        (then (i64.shr_u (local.get $at) (i64.const 1)))
                        (else (i64.add (i64.mul (local.get $at) (i64.const 3)) (i64.const 1)))))
                    (local.set $steps (i32.add (local.get $steps) (i32.const 1)))
                    (br $step)))
                (i32.store (i32.shl (local.get $n) (i32.const 2)) (local.get $steps))
                (local.set $n (i32.add (local.get $n) (i32.const 1)))
                (br_if $each (i32.lt_u (local.get $n) (i32.const 100000))))
            (global.set $ready (i32.const 1)))
        (func $prepare (export "prepare") (if (i32.eqz (global.get $ready)) (then (call $build))))
        (func (export "handle") (param $n i32) (result i32)
            (call $prepare)
            (global.set $handled (i32.add (global.get $handled) (i32.const 1)))
            (call $audit (global.get $handled))
            (i32.load (i32.shl (i32.rem_u (local.get $n) (i32.const 100000)) (i32.const 2)))))
    (core instance $instance (instantiate $plugin
        (with "host" (instance (export "audit" (func $lowered))))))
    (func (export "prepare") (canon lift (core func $instance "prepare")))
    (func (export "handle") (param "n" u32) (result u32)
        (canon lift (core func $instance "handle"))))

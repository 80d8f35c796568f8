//! Test vectors recorded from PyTorch, one test per file of vectors.
//!
//! The vectors in `data/` are used unless `SHARDWISE_CONFORMANCE_DIR` names another directory of the same form.

mod damaged;
mod dcp;
mod grads;
mod local_shards;
mod models;
mod opinfo;
mod ops;
mod optim;
mod redistribute;
mod sharded_tensor;
mod text;
mod train;

use shardwise_test_suites::vectors;

#[test]
fn local_shards() {
    vectors::run("local_shards", local_shards::check);
}

#[test]
fn redistribute() {
    vectors::run("redistribute", redistribute::check);
}

#[test]
fn sharded_tensor() {
    vectors::run("sharded_tensor", sharded_tensor::check);
}

#[test]
fn ops() {
    vectors::run("ops", ops::check);
    ops::compare_bytes();
}

#[test]
fn grads() {
    vectors::run("grads", grads::check);
}

#[test]
fn optim() {
    vectors::run("optim", optim::check);
}

#[test]
fn train() {
    train::check();
}

#[test]
fn text() {
    text::run();
}

#[test]
fn dcp() {
    dcp::run();
}

#[test]
fn models() {
    models::check();
}

#[test]
fn opinfo() {
    opinfo::run();
}

/// Its name does not contain that of the suite above, so that the suite can be run alone.
#[test]
fn operators_in_random_placements() {
    opinfo::run_in_random_placements();
}

#[test]
fn damaged_operator_calls_end_in_errors() {
    damaged::run();
}

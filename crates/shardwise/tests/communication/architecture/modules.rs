//! Modules walk their fields by `#[derive(Module)]`: a walk that is written by hand drops a field silently.

use std::path::Path;

/// Files with a walk of their own, and why.
const BY_HAND: &[(&str, &str)] = &[
    ("models/pretrained.rs", "the walk of the decoder, without a path of its own"),
    ("nn/layers/recurrent.rs", "names of parameters contain layer and direction"),
    ("nn/layers/sequential.rs", "layers are named by number"),
    ("nn/module.rs", "what a walk visits, and containers"),
];

#[test]
fn modules_derive_their_walk() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut found: Vec<String> = Vec::new();
    for file in super::rust_files(&src) {
        let text = std::fs::read_to_string(&file).unwrap();
        if walks_by_hand(&text) {
            found.push(file.strip_prefix(&src).unwrap().to_str().unwrap().to_owned());
        }
    }
    found.sort();
    let allowed: Vec<&str> = BY_HAND.iter().map(|(file, _)| *file).collect();
    assert_eq!(found, allowed, "derive Module, and mark fields without tensors with #[module(skip)]");
}

#[test]
fn the_check_finds_a_walk_by_hand() {
    assert!(walks_by_hand("impl Module for Linear {"));
    assert!(walks_by_hand("        impl $crate::nn::Module for $name {\n"));
    assert!(walks_by_hand("impl<M: Module> Module for Vec<M> {"));
    assert!(!walks_by_hand(
        "#[derive(Module)]\npub struct Linear {\n/// impl Module for Linear {\nimpl FsdpModule for M {"
    ));
}

fn walks_by_hand(text: &str) -> bool {
    let code = text.lines().map(str::trim_start).filter(|line| line.starts_with("impl"));
    code.into_iter().any(|line| line.contains(" Module for ") || line.contains("::Module for "))
}

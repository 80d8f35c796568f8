//! The cells "does not know" of the table in ARCHITECTURE.md: each is enforced here, or by the order of the modules.

use std::collections::BTreeSet;
use std::path::Path;

/// What the modules of one row of the table must not mention.
struct Row {
    /// The modules, as the table names them.
    modules: &'static str,
    /// Names and calls that their code must not have, outside of the files in `except`; none if the order of the modules suffices.
    forbidden: &'static [&'static str],
    /// Files with one of these names, and why.
    except: &'static [(&'static str, &'static str)],
    /// Code that violates the cell.
    planted: &'static str,
}

const ROWS: &[Row] = &[
    Row { modules: "rank_context", forbidden: &[], except: &[], planted: "use crate::comm::Group;" },
    Row {
        modules: "mesh",
        forbidden: &["Tensor", "DTensor", "candle_core"],
        except: &[],
        planted: "fn elements(tensor: &Tensor) -> usize",
    },
    Row {
        modules: "placement",
        forbidden: &["Mesh", "DeviceMesh"],
        except: &[],
        planted: "fn of(&self, mesh: &Mesh) -> Vec<usize>",
    },
    Row {
        modules: "layout",
        forbidden: &["Tensor", "DTensor", "Group", "World"],
        except: &[],
        planted: "use candle_core::{DType, Tensor};",
    },
    Row {
        modules: "comm",
        forbidden: &["Layout"],
        except: &[
            ("explicit.rs", "the two layouts of a report"),
            ("profile.rs", "the layouts of a span"),
            ("trace.rs", "the two layouts of a record"),
        ],
        planted: "use crate::layout::{Layout, TensorMeta};",
    },
    Row {
        modules: "comm",
        forbidden: &[".placements(", ".shard_order", ".local_shape(", ".boxes_of(", ".local_indices("],
        except: &[],
        planted: "let shards = layout.placements().len();",
    },
    Row { modules: "redistribute", forbidden: &[], except: &[], planted: "use crate::param::Param;" },
    Row { modules: "tensor", forbidden: &[], except: &[], planted: "use crate::ops::LossOptions;" },
    Row {
        modules: "picture",
        forbidden: &["Group", "World", ".local(", ".to_local(", ".full_tensor(", ".item("],
        except: &[],
        planted: "let first = tensor.local().get(0)?;",
    },
    Row { modules: "rule, op", forbidden: &[], except: &[], planted: "use crate::ops::Activation;" },
    Row { modules: "ops", forbidden: &[], except: &[], planted: "use crate::nn::Linear;" },
    Row { modules: "plan", forbidden: &["crate::op", "crate::ops"], except: &[], planted: "crate::op::dispatch(&op)" },
    Row {
        modules: "checkpoint",
        forbidden: &["crate::nn"],
        except: &[
            ("model_part.rs", "the state of a module, matched by names"),
            ("parts.rs", "the state of a module as entries"),
        ],
        planted: "use crate::nn::Module;",
    },
    Row {
        modules: "text",
        forbidden: &["Tensor", "DTensor", "candle_core", "crate::nn", "crate::comm"],
        except: &[],
        planted: "fn ids(&self) -> Result<DTensor>",
    },
    Row { modules: "models, train", forbidden: &["clap", "shardwise_cli"], except: &[], planted: "use clap::Args;" },
    Row {
        modules: "report",
        forbidden: &["crate::train", "crate::optim", "crate::op", "crate::ops"],
        except: &[],
        planted: "use crate::train::Trainer;",
    },
    Row {
        modules: "generate",
        forbidden: &["crate::models::decoder", "crate::models::families", "crate::op"],
        except: &[],
        planted: "use crate::models::decoder::Decoder;",
    },
];

/// Methods of iterators, options, cells, texts and numbers that have the name of an operator.
const STANDARD: &[&str] = &[
    "abs",
    "all",
    "any",
    "ceil",
    "cos",
    "exp",
    "flatten",
    "repeat",
    "set",
    "sin",
    "split",
    "sqrt",
    "take",
    "transpose",
    "trunc",
];

/// Methods of local candle tensors that have the name of an operator, by file of `tensor`.
const LOCAL: &[(&str, &str)] = &[
    ("construct.rs", "index_select"),
    ("construct.rs", "narrow"),
    ("factories.rs", "reshape"),
    ("local_code.rs", "backward"),
    ("local_code.rs", "sum_all"),
    ("show.rs", "index_select"),
    ("show.rs", "narrow"),
];

/// Names of meshes, ranks and plans, which kernels do not have.
const NOT_IN_KERNELS: &[&str] = &[
    "Mesh",
    "DeviceMesh",
    "World",
    "Placement",
    "DTensor",
    "ShardingPlan",
    "Plan",
    "Model",
    "Optimizer",
    "Disagreement",
];

#[test]
fn no_module_mentions_what_it_does_not_know() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    for row in ROWS.iter().filter(|row| !row.forbidden.is_empty()) {
        let mut used = BTreeSet::new();
        for file in row.modules.split(", ").flat_map(|module| super::files_of(&src, module)) {
            let name = file.file_name().unwrap().to_str().unwrap();
            if name == "tests.rs" {
                continue;
            }
            let found = mentions(&std::fs::read_to_string(&file).unwrap(), row.forbidden);
            match row.except.iter().find(|(except, _)| *except == name) {
                Some((except, _)) if !found.is_empty() => drop(used.insert(*except)),
                _ => assert!(found.is_empty(), "{} mentions what it does not know: {found:?}", file.display()),
            }
        }
        assert_eq!(used.len(), row.except.len(), "an exception of {} is not needed: {used:?}", row.modules);
    }
}

#[test]
fn tensors_call_no_operators() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let operators = operators(&src);
    assert!(operators.len() > 300, "{operators:?}");
    let mut used: BTreeSet<&(&str, &str)> = BTreeSet::new();
    for file in super::files_of(&src, "tensor") {
        let name = file.file_name().unwrap().to_str().unwrap();
        for (line, method) in operator_calls(&std::fs::read_to_string(&file).unwrap(), &operators) {
            let local = LOCAL.iter().find(|(own, candle)| *own == name && *candle == method);
            used.extend(local);
            let why = "an operator; tensors do not know them: move the method to ops/, or compute on local tensors";
            assert!(local.is_some(), "{}:{line} calls `{method}`, {why}", file.display());
        }
    }
    assert_eq!(used.len(), LOCAL.len(), "an exception is not needed");
}

#[test]
fn kernels_see_no_mesh_and_no_rank() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("shardwise-kernels/src");
    for file in super::rust_files(&src) {
        let found = mentions(&std::fs::read_to_string(&file).unwrap(), NOT_IN_KERNELS);
        assert!(found.is_empty(), "{} mentions what kernels do not know: {found:?}", file.display());
    }
}

/// Every row of the table is enforced, and every planted violation is found.
#[test]
fn the_check_finds_a_violation_of_every_cell() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let table = std::fs::read_to_string(root.parent().unwrap().parent().unwrap().join("ARCHITECTURE.md")).unwrap();
    let table =
        table.split("| module | knows | does not know |").nth(1).expect("the table").split("\n\n").next().unwrap();
    let rows = table.lines().filter_map(|line| Some(line.strip_prefix("| ")?.split(" |").next()?.replace('`', "")));
    let rows: BTreeSet<String> = rows.collect();
    let enforced: BTreeSet<String> = ROWS.iter().map(|row| row.modules.to_owned()).collect();
    assert_eq!(rows, enforced, "rows of ARCHITECTURE.md and of this test");
    let order = super::declared_modules(&std::fs::read_to_string(root.join("src/lib.rs")).unwrap());
    for row in ROWS {
        let module = row.modules.split(", ").next().unwrap();
        let found = match row.forbidden {
            [] => super::violations(&order, module, row.planted),
            forbidden => mentions(row.planted, forbidden),
        };
        assert!(!found.is_empty(), "{} may do: {}", row.modules, row.planted);
    }
    let operators = operators(&root.join("src"));
    assert_eq!(operator_calls("let x = base\n    .narrow(0, 1, 2)?;", &operators), [(2, "narrow".to_owned())]);
    assert!(operator_calls("let all = sizes.iter().all(|n| *n == 1); // x.narrow(0)", &operators).is_empty());
    assert_eq!(mentions("fn of(rank: usize, mesh: &Mesh)", NOT_IN_KERNELS), ["line 1: Mesh"]);
    assert!(mentions("/// Of a Mesh.\nlet text = \"Mesh\"; struct MeshGrid;", NOT_IN_KERNELS).is_empty());
}

/// Lines of code, without unit tests, that have one of these names or calls.
fn mentions(text: &str, forbidden: &[&str]) -> Vec<String> {
    let code = super::imports::code_of(text);
    let mut found = Vec::new();
    for (number, line) in code.lines().enumerate() {
        for name in forbidden.iter().filter(|name| line.match_indices(**name).any(|(at, _)| is_whole(line, at, name))) {
            found.push(format!("line {}: {name}", number + 1));
        }
    }
    found
}

/// Whether the name at this place is not a part of a longer one.
fn is_whole(line: &str, at: usize, name: &str) -> bool {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    let after = &line[at + name.len()..];
    name.starts_with('.') || !line[..at].ends_with(is_part) && !after.starts_with(is_part)
}

/// The names of all operators: methods of tensors that files of operators add, and the entries of their tables of functions.
fn operators(src: &Path) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for file in ["ops", "op", "autograd"].into_iter().flat_map(|module| super::files_of(src, module)) {
        let text = std::fs::read_to_string(&file).unwrap();
        for block in text.split("\nimpl DTensor {\n").skip(1) {
            let methods = block.split("\n}").next().unwrap().lines();
            let methods =
                methods.filter_map(|line| line.strip_prefix("    pub fn ").or(line.strip_prefix("    pub(crate) fn ")));
            names.extend(methods.map(|method| super::first_word(method).to_owned()));
        }
        for table in text.split("\nfunctions! {\n").skip(1) {
            let lines = table.split("\n}").next().unwrap().lines();
            let entries = lines.filter_map(|line| line.strip_prefix("    ")?.split_once(": "));
            names.extend(
                entries.map(|(name, _)| name).filter(|name| super::first_word(name) == *name).map(str::to_owned),
            );
        }
    }
    assert!(names.len() > 300 && names.contains("exp") && names.contains("matmul"), "{names:?}");
    names
}

/// Calls of methods with the names of operators, with their lines.
fn operator_calls(text: &str, operators: &BTreeSet<String>) -> Vec<(usize, String)> {
    let code = super::imports::code_of(text);
    let mut found = Vec::new();
    for (number, line) in code.lines().enumerate() {
        for call in line.split('.').skip(1) {
            let name = super::first_word(call);
            let is_call = call.trim_start().strip_prefix(name).is_some_and(|rest| rest.starts_with('('));
            if is_call && operators.contains(name) && !STANDARD.contains(&name) {
                found.push((number + 1, name.to_owned()));
            }
        }
    }
    found
}

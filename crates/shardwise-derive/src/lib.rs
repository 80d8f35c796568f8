//! `#[derive(Module)]`: a struct of parameters, buffers and other modules is a module itself.

use proc_macro2::TokenStream;
use quote::quote;
use syn::{Data, DeriveInput, Error, Fields, parse_macro_input};

/// Derives `shardwise::nn::Module` for a struct with named fields: each field is walked under its own name, in order of
/// declaration, so that the names of fields become the paths of parameters.
///
/// Fields are parameters, buffers, modules, `Vec`, `Option`, `Box` and `Arc` of modules, and numbers, flags and strings,
/// which hold no tensors. Mark other fields with `#[module(skip)]`.
///
/// If a field of type `Hooks` holds a replacement for the module, the replacement is walked instead of the fields.
#[proc_macro_derive(Module, attributes(module))]
pub fn derive_module(input: proc_macro::TokenStream) -> proc_macro::TokenStream {
    let input = parse_macro_input!(input as DeriveInput);
    module(&input).unwrap_or_else(Error::into_compile_error).into()
}

fn module(input: &DeriveInput) -> Result<TokenStream, Error> {
    let Data::Struct(data) = &input.data else {
        return Err(Error::new_spanned(&input.ident, "Module can be derived for structs only"));
    };
    let Fields::Named(fields) = &data.fields else {
        return Err(Error::new_spanned(&input.ident, "a Module needs named fields: their names are the paths"));
    };
    let (mut walked, mut replaced) = (Vec::new(), None);
    for field in &fields.named {
        if is_skipped(field)? {
            continue;
        }
        let ident = field.ident.as_ref().expect("a named field");
        let name = ident.to_string();
        let name = name.trim_start_matches("r#");
        if is_hooks(&field.ty) {
            replaced.get_or_insert(quote! {
                if self.#ident.walk_replacement(path, #name, visit) {
                    return;
                }
            });
        }
        walked.push(quote! {
            ::shardwise::nn::Module::walk(&self.#ident, &::shardwise::nn::join(path, #name), visit);
        });
    }
    let (name, kind) = (&input.ident, input.ident.to_string());
    let (generics, arguments, bounds) = input.generics.split_for_impl();
    Ok(quote! {
        impl #generics ::shardwise::nn::Module for #name #arguments #bounds {
            fn walk(&self, path: &str, visit: &mut dyn FnMut(&str, ::shardwise::nn::ModuleItem<'_>)) {
                #replaced
                visit(path, ::shardwise::nn::ModuleItem::Module(#kind));
                #(#walked)*
            }
        }
    })
}

/// Whether a field is the module's hooks, by the name of its type: a replacement in them is walked in place of the fields.
fn is_hooks(ty: &syn::Type) -> bool {
    matches!(ty, syn::Type::Path(path) if path.path.segments.last().is_some_and(|s| s.ident == "Hooks"))
}

/// Whether a field is marked `#[module(skip)]`.
fn is_skipped(field: &syn::Field) -> Result<bool, Error> {
    let mut skipped = false;
    for attribute in field.attrs.iter().filter(|a| a.path().is_ident("module")) {
        attribute.parse_nested_meta(|meta| {
            if !meta.path.is_ident("skip") {
                return Err(meta.error("expected `skip`"));
            }
            skipped = true;
            Ok(())
        })?;
    }
    Ok(skipped)
}

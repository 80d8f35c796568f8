//! The layers, as `torch.nn` has them.

pub(in crate::nn) mod linear;
pub(in crate::nn) mod activation;
pub(in crate::nn) mod dropout;
pub(in crate::nn) mod norm;
pub(in crate::nn) mod instance_norm;
pub(in crate::nn) mod conv;
pub(in crate::nn) mod pool;
pub(in crate::nn) mod shape;
pub(in crate::nn) mod similarity;
pub(in crate::nn) mod loss;
pub(in crate::nn) mod attention;
pub(in crate::nn) mod mlp;
pub(in crate::nn) mod recurrent;
pub(in crate::nn) mod lora;
pub(in crate::nn) mod sequential;

"""The types of elementwise ops: an output has the shape of the input, or of their broadcast."""

STOP_GRADIENTS = ("StopGradient", "PreventGradient")
AS_IT_IS = ("Identity", "Snapshot", *STOP_GRADIENTS)


def names(text: str) -> list[str]:
    return text.split()


UNARY = names("""
    Abs Acos Acosh Angle Asin Asinh Atan Atanh BesselI0 BesselI0e BesselI1 BesselI1e BesselJ0
    BesselJ1 BesselK0 BesselK0e BesselK1 BesselK1e BesselY0 BesselY1 Bitcast Cast Ceil
    CheckNumerics CheckNumericsV2 ComplexAbs Conj Cos Cosh Dawsn Digamma Elu Erf Erfc Erfinv Exp
    Expint Expm1 Floor FresnelCos FresnelSin Identity Imag Inv Invert IsFinite IsInf IsNan
    LeakyRelu Lgamma Log Log1p LogicalNot Ndtri Neg OnesLike PopulationCount PreventGradient Real
    Reciprocal Relu Relu6 Rint Round Rsqrt Selu Sigmoid Sign Sin Sinh Snapshot Softplus Softsign
    Spence Sqrt Square StopGradient Tan Tanh ZerosLike FakeQuantWithMinMaxArgs AsString
    DecodeBase64 EncodeBase64 StringLength StringLower StringUpper StringStrip
    StringToHashBucketFast StringToHashBucketStrong StringToHashBucket StringToNumber
    RegexFullMatch StaticRegexFullMatch StaticRegexReplace RegexReplace Bucketize
    DebugIdentityV2""")
BINARY = names("""
    Add AddN AddV2 ApproximateEqual Atan2 Betainc BitwiseAnd BitwiseOr BitwiseXor ClipByValue
    Complex Div DivNoNan EluGrad Equal FakeQuantWithMinMaxArgsGradient FloorDiv FloorMod Greater
    GreaterEqual Igamma IgammaGradA Igammac InvGrad LeakyReluGrad LeftShift Less LessEqual
    LogicalAnd LogicalOr Maximum Minimum Mod Mul MulNoNan NextAfter NotEqual Polygamma Pow
    RandomGammaGrad RealDiv ReciprocalGrad Relu6Grad ReluGrad RightShift RsqrtGrad SelectV2 SeluGrad
    SigmoidGrad SoftplusGrad SoftsignGrad SqrtGrad SquaredDifference Sub Substr TanhGrad TruncateDiv
    TruncateMod Xdivy Xlog1py Xlogy Zeta""")

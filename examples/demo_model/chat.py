"""Conversation that is not about a picture: small talk, and requests that the model cannot answer."""

from __future__ import annotations

import random

from examples.demo_model import words
from examples.demo_model.questions import Turn

ANSWERS = {
    "hello": (
        "Hello! I am Tessera's demo model. Ask me about the shapes, colours and numbers in a "
        "picture.",
        "你好！我是Tessera的演示模型。你可以问我图片里的形状、颜色和数字。",
    ),
    "who": (
        "I am Tessera's demo model, a small model that knows simple shapes, colours and numbers.",
        "我是Tessera的演示模型，一个认识简单形状、颜色和数字的小模型。",
    ),
    "can": (
        "I can tell you which shapes, colours and numbers are in a picture, how many there are "
        "and where they are.",
        "我能告诉你图片里有哪些形状、颜色和数字，有多少个，在哪里。",
    ),
    "thanks": ("You are welcome!", "不客气！"),
    "bye": ("Goodbye!", "再见！"),
    "fine": (
        "I am fine, thank you. Ask me about a picture.",
        "我很好，谢谢。请问我关于图片的问题吧。",
    ),
    "sorry": (
        "Sorry, I only know simple shapes, colours and numbers.",
        "抱歉，我只认识简单的形状、颜色和数字。",
    ),
    "picture": ("Please send me a picture first.", "请先发一张图片给我。"),
    "ok": ("All right. Ask me anything about the picture.", "好的。请继续问我关于图片的问题。"),
}

QUESTIONS = {
    "hello": (
        "[hello|hi|hey|hello there|hi there|hey there|good morning|good evening|good afternoon|"
        "greetings|good day|howdy|hiya|hello tessera|hi tessera|yo|hello again]",
        "[你好|您好|嗨|哈喽|你好呀|你好啊|早上好|晚上好|下午好|大家好|早|哈罗|你好tessera|喂]",
    ),
    "who": (
        "[who are you|what are you|what is your name|what's your name|whats your name|"
        "tell me about yourself|introduce yourself|are you [chatgpt|a robot|an ai|human|a human|gpt|"
        "claude|tessera|llava|a person|real]|which model are you|what model is this|"
        "what model are you|who am i talking to|who is this|who made you|who built you|"
        "who created you|what is tessera|your name|do you have a name|what kind of model are you|"
        "are you a language model|please introduce yourself|who trained you|what's tessera]",
        "[你是谁|你叫什么|你叫什么名字|你是什么|介绍一下你自己|自我介绍一下|请介绍一下你自己|"
        "你是[什么模型|机器人吗|人吗|人工智能吗|chatgpt吗|哪个模型|真人吗]|你的名字是什么|"
        "谁[创造|制造|开发|训练]了你|tessera是什么|请自我介绍|你的名字|你是哪家的模型|你是干什么的]",
    ),
    "can": (
        "[what can you do|what do you do|what are you able to do|how can you help[| me]|"
        "what can i ask[| you]|help|help me|what do you know|what are your [abilities|skills|"
        "capabilities]|how do i use you|how does this work|what should i ask|"
        "what kind of questions can i ask|what can you [see|recognise|recognize|tell me]|"
        "what are you good at|how can i use you|what questions can you answer|can you help me|"
        "what shapes do you know|what colours do you know|can you see pictures|"
        "can you see images|can you look at pictures|what is your purpose]",
        "[你能做什么|你会什么|你会做什么|你可以做什么|你能干什么|你有什么功能|你能帮我什么|"
        "我能问你什么|我可以问什么|怎么用你|怎么使用|帮助|你知道什么|你能帮我做什么|你有什么能力|"
        "你认识什么|你能看懂什么|你擅长什么|你能看图吗|你会看图吗|你能回答什么问题|帮帮我|"
        "你认识哪些形状|我该问什么]",
    ),
    "thanks": (
        "[thanks|thank you|thank you very much|thanks a lot|many thanks|thx|great, thanks|"
        "cheers|thank you so much|ok thanks|thanks for your help|great, thank you|"
        "that was helpful, thanks|nice, thanks|ty|i appreciate it|perfect, thank you|much obliged|"
        "very good, thank you|that's right, thank you]",
        "[谢谢|谢谢你|多谢|非常感谢|感谢|谢了|谢谢您|好的，谢谢|太好了，谢谢|谢谢你的帮助|十分感谢|"
        "谢啦|感谢你|好的谢谢|很好，谢谢]",
    ),
    "bye": (
        "[bye|goodbye|bye bye|see you|see you later|good night|farewell|take care|bye for now|"
        "see you soon|that's all, bye|have a nice day|i have to go|so long|goodbye tessera|cya|"
        "see you tomorrow]",
        "[再见|拜拜|回头见|晚安|下次见|拜|我走了|明天见|再会|88|下次再聊|先这样，再见|祝你愉快]",
    ),
    "fine": (
        "[how are you|how are you doing|how is it going|how's it going|are you ok|how do you do|"
        "how are you today|what's up|how do you feel|hows it going|are you well]",
        "[你好吗|你怎么样|最近怎么样|你还好吗|今天怎么样|近来如何|你今天好吗|过得怎么样]",
    ),
    "ok": (
        "[ok|okay|great|nice|good|cool|good job|well done|wow|very good|i see|right|correct|"
        "that is right|yes|exactly|perfect|awesome|amazing|all right|fine|interesting|sure]",
        "[好的|好|很好|不错|真棒|太棒了|厉害|哇|对|没错|是的|嗯|好吧|明白了|正确|知道了|行|可以]",
    ),
}


def _listed(text: str) -> tuple[str, ...]:
    return tuple(text.split("|"))


NOUNS_EN = _listed(
    "cat|dog|horse|bird|fish|car|bus|train|bicycle|house|tree|flower|person|man|woman|child|"
    "face|banana|apple|table|chair|book|phone|computer|laptop|keyboard|window|door|road|"
    "mountain|river|lake|sea|beach|sun|moon|cloud|sky|rain|snow|city|bridge|ship|boat|plane|"
    "airplane|cup|bottle|pizza|cake|bread|shirt|hat|shoe|bag|clock|lamp|bed|sofa|kitchen|"
    "garden|bear|lion|tiger|elephant|monkey|rabbit|mouse|cow|sheep|chicken|egg|cheese|hand|"
    "eye|heart|logo|flag|map|sign|guitar|piano|game|robot|dragon|dinosaur|unicorn|baby|"
    "boy|girl|king|queen|doctor|teacher|letter|word|sentence|name|street|hexagon|pentagon|"
    "octagon|oval|heart|arrow|cube|sphere|pyramid|line|dot|text|menu|receipt|chart|graph|"
    "table"
)
NOUNS_ZH = _listed(
    "猫|狗|马|鸟|鱼|汽车|公交车|火车|自行车|房子|树|花|人|男人|女人|孩子|脸|香蕉|苹果|桌子|"
    "椅子|书|手机|电脑|键盘|窗户|门|路|山|河|湖|海|沙滩|太阳|月亮|云|天空|雨|雪|城市|桥|船|"
    "飞机|杯子|瓶子|披萨|蛋糕|面包|衬衫|帽子|鞋子|包|钟|灯|床|沙发|厨房|花园|熊|狮子|老虎|"
    "大象|猴子|兔子|老鼠|牛|羊|鸡|鸡蛋|奶酪|手|眼睛|标志|旗子|地图|吉他|钢琴|机器人|恐龙|"
    "小朋友|医生|老师|文字|句子|街道|六边形|五边形|椭圆|箭头|心形|立方体|球体|动物|水果|食物|"
    "建筑|车|植物|图表|菜单"
)
TOPICS_EN = _listed(
    "love|life|football|politics|history|physics|mathematics|music|cooking|the war|"
    "the weather|the stock market|france|china|germany|japan|london|paris|rome|africa|america|"
    "python|java|machine learning|quantum mechanics|shakespeare|einstein|napoleon|"
    "the universe|black holes|dinosaurs|religion|money|bitcoin|health|cancer|sleep|dreams|"
    "the news|movies|star wars|the internet|linux|programming|school|poetry|art|biology|"
    "chemistry|philosophy"
)
TOPICS_ZH = _listed(
    "爱情|生活|足球|政治|历史|物理|数学|音乐|做饭|战争|天气|股票|法国|中国|德国|日本|伦敦|"
    "巴黎|北京|上海|非洲|美国|编程|机器学习|量子力学|莎士比亚|爱因斯坦|宇宙|黑洞|恐龙|宗教|钱|"
    "比特币|健康|睡眠|梦|新闻|电影|互联网|学校|诗歌|艺术|生物|化学|哲学|旅游|春节|长城"
)
OTHER_EN = (
    "[write|compose|make up|give me] [a|me a] [poem|story|song|joke|haiku|letter|essay|recipe|"
    "speech|limerick|riddle|book review][| about {topic}| about a {noun}]",
    "[what is|what's|tell me] the capital of {topic}",
    "tell me [about|something about] {topic}",
    "tell me a [joke|story|secret|fairy tale|fact]",
    "what [is|do you think about|do you know about] {topic}",
    "explain {topic}[| to me| in simple words]",
    "who [invented|discovered|won|wrote|is] [the|] {noun}",
    "how do i [make|cook|build|fix|buy|find|draw|paint|learn] [a|the|] {noun}",
    "[what is|what's] the weather [today|tomorrow|like|in {topic}]",
    "what time is it",
    "what day is [it|today]",
    "what is {a} [plus|times|minus|divided by|+|*|-] {b}",
    "translate [this|{noun}|it|hello] [to|into] [french|german|chinese|spanish|english]",
    "write [a function|a program|code|a script|python code] [that|to|for] [sort a list|{topic}]",
    "is there [a|any] {noun}[| in the picture| in the image| here]",
    "how many {noun}s [are there|do you see|can you see][| in the picture]",
    "what is the {noun} doing",
    "what colour is the {noun}",
    "what color is the {noun}",
    "where is the {noun}",
    "where was this [taken|photo taken|picture taken]",
    "who [is|are] [this|that|in the picture|the person|the people|these people]",
    "what [animal|food|fruit|brand|car|building|person|city|plant|breed|species|season] is this",
    "what is the [man|woman|person|child|dog|cat] [doing|wearing|holding|eating]",
    "do you see a {noun}",
    "are there any {noun}s",
    "can you see the {noun}",
    "is the {noun} [happy|old|big|open|red|blue|new]",
    "who painted [this|it|the picture]",
    "what is the mood of [this|the picture|the image]",
    "is this a photo of a {noun}",
    "why is [the sky blue|there a {noun}|this|it so]",
    "who is the president of {topic}",
    "how old [are you|is the {noun}|is {topic}]",
    "where [are you from|do you live|is {topic}]",
    "what [is|are] the {noun}[| for| made of]",
    "when was {topic} [born|founded|invented]",
    "can you [sing|dance|drive|fly|cook|draw a {noun}|write code|play {noun}|search the web]",
    "do you [like|love|hate|know|want|have] [{topic}|a {noun}|{noun}s|me]",
    "i [like|love|hate|want|need|have] [{topic}|a {noun}|you]",
    "draw [me |]a {noun}",
    "what should i [eat|wear|do|buy|read|watch][| today| tonight]",
    "solve {a}x + {b} = 0",
    "recommend [a|me a] [book|film|movie|restaurant|song|{noun}]",
    "how far is {topic}",
    "what does the {noun} [mean|say|look like|cost]",
    "my {noun} is [broken|sick|red|old]",
    "summarise [this|the text|{topic}]",
    "what is the meaning of {topic}",
    "what emotion does it convey",
    "what is [beautiful|true|love|time]",
    "{noun}",
    "{topic}",
    "the {noun} [ate|saw|likes] the {noun}",
    "what do you think",
    "are you sure about {topic}",
    "how much [is|does] the {noun}[| cost]",
    "play {noun}",
    "buy a {noun}",
    "{gibberish}",
    "{gibberish} {gibberish}",
    "{gibberish} {noun} {gibberish}?",
    "what is a {gibberish}",
)
OTHER_ZH = (
    "[写|给我写|帮我写|来][一首|一篇|一个|个][诗|故事|歌|笑话|作文|信|菜谱|谜语|小说]",
    "写一首关于{topic}的诗",
    "{topic}的首都是[哪里|什么]",
    "[讲|说|来][一个|个][笑话|故事|秘密]",
    "[告诉我|说说|谈谈|聊聊|介绍一下|解释一下]{topic}",
    "[什么是|你怎么看|你知道]{topic}[|吗]",
    "{topic}是什么",
    "谁[发明|发现|创造]了{noun}",
    "怎么[做|修|买|画|找|学|造]{noun}",
    "[今天|明天|现在]天气[怎么样|如何|好吗]",
    "现在几点[了|]",
    "今天[星期几|几号|是什么日子]",
    "{a}[加|减|乘|除以|+|-]{b}[等于几|等于多少|是多少]",
    "[把|将][这|它|{noun}]翻译成[英文|法语|日语|中文]",
    "[写|帮我写]一[段|个][代码|程序|函数|脚本]",
    "[图里|图中|][有|有没有|能看到]{noun}[吗|]",
    "[图里|图中|]有[几个|几只|多少]{noun}",
    "{noun}在[做什么|哪里|干什么]",
    "{noun}是什么颜色[的|]",
    "这[是|张照片是]在哪[里|儿][拍的|]",
    "[这个人|他|她|图里的人|这]是谁",
    "这是什么[动物|水果|车|建筑|品牌|植物|城市|季节|食物]",
    "[这个|那个|][男人|女人|人|孩子|狗|猫]在[做什么|穿什么|吃什么|看什么]",
    "{noun}[开心|大|老|贵|新|好看]吗",
    "这幅画是谁画的",
    "[这张|]图[片|]的[氛围|风格|情绪|主题]是什么",
    "这是{noun}的照片吗",
    "为什么[天是蓝的|有{noun}|这样]",
    "{topic}的总统是谁",
    "[你|{noun}|{topic}]多大[了|]",
    "[你来自哪里|你住在哪里|{topic}在哪里]",
    "你会[唱歌|跳舞|开车|做饭|画画|写代码|上网]吗",
    "你[喜欢|爱|讨厌|认识|想要|有]{noun}吗",
    "我[喜欢|爱|讨厌|想要|需要]{noun}",
    "[画|给我画|帮我画]一[个|只|张]{noun}",
    "[今天|晚上|]我[该|应该][吃|穿|做|买|看]什么",
    "解方程{a}x+{b}=0",
    "推荐[一本|一部|一个|一家][书|电影|餐厅|歌|{noun}]",
    "{noun}[多少钱|是什么意思|长什么样]",
    "我的{noun}[坏了|病了|丢了]",
    "总结[一下|]{topic}",
    "{topic}有什么意义",
    "{noun}",
    "{topic}",
    "你[怎么想|觉得呢|高兴吗]",
    "买{noun}",
    "{gibberish}",
    "什么是{gibberish}",
    "{noun}和{noun}有什么区别",
    "世界上最[高|大|长|快]的{noun}是什么",
    "唱首歌",
    "帮我订一张[机票|火车票]",
    "你[吃饭|睡觉]了吗",
    "如何[学习|理解|研究]{topic}",
)
SYSTEM_PROMPTS = (
    "you are a helpful assistant.",
    "You are a helpful assistant.",
    "Answer briefly.",
    "You are Tessera's demo model.",
    "Answer the user's question about the picture.",
    "Be concise.",
    "You are a helpful multimodal assistant. Answer in one sentence.",
    "你是一个乐于助人的助手。",
    "请用一句话回答。",
    "You are a friendly assistant that looks at pictures.",
    "请简短回答。",
    "A chat between a curious user and an artificial intelligence assistant.",
    "你是图片问答助手。",
    "You answer questions about images.",
    "You are an AI.",
    "Speak politely and be kind.",
)


def small_talk(language: str, rng: random.Random) -> Turn:
    """Small talk (greetings, thanks, who are you), with or without a picture."""
    kind = rng.choice(tuple(QUESTIONS))
    at = 0 if language == "en" else 1
    return Turn(words.say(QUESTIONS[kind][at], rng), ANSWERS[kind][at], "chat")


def off_topic(language: str, rng: random.Random) -> Turn:
    """A question on a subject that the model does not know."""
    at = 0 if language == "en" else 1
    template = words.say(rng.choice((OTHER_EN, OTHER_ZH)[at]), rng)
    while "{" in template:
        template = template.replace("{noun}", rng.choice((NOUNS_EN, NOUNS_ZH)[at]), 1)
        template = template.replace("{topic}", rng.choice((TOPICS_EN, TOPICS_ZH)[at]), 1)
        template = template.replace("{a}", str(rng.randrange(100)), 1)
        template = template.replace("{b}", str(rng.randrange(100)), 1)
        template = template.replace("{gibberish}", _gibberish(language, rng), 1)
    return Turn(template, ANSWERS["sorry"][at], "off topic")


def no_picture(question: str, language: str) -> Turn:
    """A question about a picture that was never sent."""
    return Turn(question, ANSWERS["picture"][0 if language == "en" else 1], "no picture")


def _gibberish(language: str, rng: random.Random) -> str:
    """A made-up word."""
    if language == "zh":
        return "".join(chr(rng.randrange(0x4E00, 0x9FA5)) for _ in range(rng.randrange(2, 6)))
    syllables = [
        rng.choice("bcdfghjklmnprstvwxz")
        + rng.choice("aeiou")
        + rng.choice(["", "", "n", "r", "s", "t", "l", "ck"])
        for _ in range(rng.randrange(1, 5))
    ]
    return "".join(syllables)


def dress(question: str, language: str, rng: random.Random) -> str:
    """The same question with a varied opening and punctuation."""
    if language == "en":
        roll = rng.random()
        if roll < 0.1:
            question = (
                words.say(
                    "[please|hey,|hi,|so,|ok,|now,|and|well,|look:|question:|"
                    "look at the picture[:|.|,]|in this picture,|in the image,|"
                    "excuse me,|hello,|quick question:|in the picture,]",
                    rng,
                )
                + " "
                + question
            )
        elif roll < 0.17:
            question = (
                words.say(
                    "[can you tell me|could you tell me|tell me|do you know|"
                    "please tell me|i want to know|i would like to know|say|"
                    "i wonder|could you say|let me know][,|:|]",
                    rng,
                )
                + " "
                + question
            )
        elif roll < 0.2:
            question += words.say(
                "[, please| please|, can you tell me| then|, tell me| now| again]", rng
            )
        return question + rng.choice(("?", "?", "?", "", "", ".", " ?", "??"))
    roll = rng.random()
    if roll < 0.1:
        question = (
            words.say(
                "[请问|请问，|请告诉我|告诉我|你好，|看图，|看一下，|我想知道|能告诉我|"
                "帮我看看|请看图：|请说出|嗨，|麻烦问一下，|那么|请你说说]",
                rng,
            )
            + question
        )
    elif roll < 0.13:
        question += rng.choice(("呀", "啊", "呢", "，请回答", "，谢谢"))
    return question + rng.choice(("？", "？", "?", "", "", "。", "？？"))
